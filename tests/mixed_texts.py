"""471 texts of all kinds, always the same: what a tokenizer may meet in documents, prompts and conversations."""

# ruff: noqa: RUF001 (characters that look like others are wanted)

import random
import sys

NUM_TEXTS = 471

SCRIPTS = (
    "The quick brown fox jumps over the lazy dog, doesn't it? I'LL say they've won; we'd know.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich – „Straße“, ſ, ẞ.",
    "Voix ambiguë d’un cœur qui, au zéphyr, préfère les jattes de kiwis : « oui » !",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia; ¿añoraba a su querido cachorro?",
    "Pchnąć w tę łódź jeża lub ośm skrzyń fig. Příliš žluťoučký kůň. Árvíztűrő tükörfúrógép.",
    "Pijamalı hasta yağız şoföre çabucak güvendi: İstanbul, ISPARTA, ı i.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Σίσυφος",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה. שָׁלוֹם",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ١٢٣٤٥ مُحَمَّد",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा १२३४५ क्ष ज्ञ",
    "আমি কাঁচ খেতে পারি, তাতে আমার কোনো ক্ষতি হয় না।",
    "நான் கண்ணாடி சாப்பிடுவேன் ౧౨౩ ಕನ್ನಡ മലയാളം ગુજરાતી ਪੰਜਾਬੀ",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า ๑๒๓ ລາວ ភាសាខ្មែរ မြန်မာ",
    "敏捷的棕色狐狸跳过懒狗。「你好」，世界！一二三、四五六……",
    "いろはにほへと ちりぬるを ｱｲｳｴｵ ガギグゲゴ カ\u3099 々〆ヶ",
    "다람쥐 헌 쳇바퀴에 타고파 한글 \u1112\u1161\u11ab",
    "ქართული ენა Հայերեն ትግርኛ አማርኛ ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ ⵜⴰⵎⴰⵣⵉⵖⵜ",
    "བོད་སྐད ᠮᠣᠩᠭᠣᠯ ꦧꦱꦗꦮ 𒀭𒈾 𐌰𐌱 𓀀𓂀 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠜎𠜱",
    "Tiếng Việt: Một buổi sáng đẹp trời, ế ộ ữ; e\u0323\u0302 \u01b0\u0303",
)
SYMBOLS = (
    "😀😃 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ❤️ ☺ ✊🏿 🧑🏻‍🚀", "1️⃣ #️⃣ ©️ ™ ℃ № ½ ⅓ ² ₂ Ⅷ ﬁ ﷺ Å Å ①②③", "→ ⇒ ∑∫√∞≠≤≥ ∂f/∂x α→β ⟨ψ|φ⟩ ℝ³",
    "$1,234.56 €99 ¥1000 £5 ₿0.5 100% 3.14159265358979",
    "1 12 123 1234 12345 123456 1234567890 007 1e-9 0x1F 192.168.0.1",
    "...!!!??? --- === *** ~~~ ### (((())) [[]] {{}} <<>> \\\\ ///", "a-b_c.d,e;f:g!h?i'j\"k`l~m@n#o$p%q^r&s*t(u)v",
    "“quotes” ‘single’ ‹a› «b» „c‟ – — ― … ‥ · • ‣",
    "e\u0301 \u00e9 a\u030a \u00e5 n\u0303\u0304 \u0344 \u2126 \uac00 \u1100\u1161", "z̸̢̛͎͙͗ä̴́l̵g̶o̷",
    "\u202eright to left\u202c \u2066isolate\u2069 \u200f\u200e", "a\u200db a\u200cb a\u2060b soft\u00adhyphen",
)  # fmt: skip
CODE = (
    "def main(argv: list[str]) -> None:\n    for word in argv[1:]:\n        print(f'{word!r:>10}', end='\\n')\n",
    "\tif (x != NULL && *x++ == 'a') {\n\t\treturn -1; // why?\n\t}\r\n#define MAX(a,b) ((a)>(b)?(a):(b))\r\n",
    'SELECT COUNT(*) AS "n" FROM t WHERE a <> \'it\'\'s\' AND b IS NOT NULL;',
    '{"key": [1, 2.5e-3, null, true], "nested": {"ünï": "\\u00e9\\n"}}',
    "<div class=\"a b\">\n  <p>x &lt; y &amp;&amp; z</p>\n</div>\n<!-- comment -->",
    "curl -sSL 'https://example.org/a?b=c&d=%20e#f' | tar xz -C /tmp && echo \"$HOME\" 2>&1",
    "# Title\n\n* item\n    1. sub-item\n\n| a | b |\n|---|:-:|\n| `x` | **y** |\n\n```sh\nls -la\n```\n",
    "fn f<'a, T: Fn(&'a str) -> u8>(x: T) -> Option<u8> { Some(x(\"é\")?) }",
    "\\begin{equation}\n  e^{i\\pi} + 1 = 0 \\quad \\forall x \\in \\mathbb{R}\n\\end{equation}",
    "x=1\n\n\n\ny = 2\n  \n    z\n \t \n", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "CamelCaseIdentifierWith_snake_case_and-kebab-case42",
)  # fmt: skip
SPACES = (
    "", " ", "  ", "   ", "    ", " " * 7, " " * 16, " " * 33, "\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n", "\r", "\t",
    "\t\t", " \n", "\n ", " \t \n\t ", "\n \n \n", "  leading", "trailing  ", "  both  ", "a  b   c    d", "a\nb",
    "a\n\nb", "a \n b", "\u00a0", "a\u00a0b", "\u3000", "\u2003a\u2009b", "\u2028", "\u2029x", "\u0085", "\u200b",
    "\ufeff", "\ufeffbom", "\x0b\x0c", "\u1680\u180e", "\u205f",
)  # fmt: skip
SPACE_CHARACTERS = (
    "\u2581", "\u2581\u2581", " \u2581", "\u2581 ", "\u2581a", "a\u2581", "a\u2581b", "a \u2581 b",
    "\u2581\u2581\u2581the", "\u2581\n\u2581", "the\u2581quick \u2581brown\u2581 fox", "x\u2581\u2581 y",
    "\u2581<s>\u2581", "\u2581狐狸", "\u2581😀\u2581",
)  # fmt: skip
CONTROLS = (
    "\0", "a\0b", "\0\0\0", "\x01", "\x07bell", "\x08", "\x1b[31mred\x1b[0m", "\x7f", "\x80\x9f",
    "\x01\x02\x03\x04\x05\x06", "\ue000", "\uf8ff", "\ufffd", "\ufffe", "\uffff", "\U0010ffff", "\U000e0041\U000e007f",
    "\u0378", "\ufff9\ufffa\ufffb", "\u2047", "?⁇!", "a\x00\n\x00b",
)  # fmt: skip
LOOK_ALIKES = (
    "<s>", "</s>", "<unk>", "<pad>", "<s>text</s>", "<s> text </s>", "a<s>b", "a</s> b", "</s><s>", "<S>", "< s >",
    "<s", "s>", "<|endoftext|>", "a<|endoftext|>b", "<|endoftext|><|endoftext|>", "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_", "|im_end|>", "<|begin_of_text|>", "<|end_of_text|>",
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>", "<|eot_id|>", "[INST] hi [/INST]", "[INST]", "[/INST]",
    "[AVAILABLE_TOOLS]", "[TOOL_CALLS] [{}]", "[SYSTEM_PROMPT]x[/SYSTEM_PROMPT]", "<<SYS>>\nbe kind\n<</SYS>>\n\n",
    "<0x0A>", "<0x00><0xFF>", "<0x0a>", "<extra_id_0>", "[PAD]", "[UNK] [CLS] [SEP]", "[control_8]",
    "<|reserved_special_token_0|>", "<|python_tag|>", "<|vision_start|>", "<tool_call>\n{}\n</tool_call>",
    "<think>\nhm\n</think>", "<|finetune_right_pad_id|>", "</s", "the </s> of the <s> in </unk>",
)  # fmt: skip

_GLUE = ("", " ", "  ", "\n", "\n\n", "\t", "\u2581", ", ", "\r\n", " \u2581", "<s>", "\u00a0")


def _mixed() -> tuple[str, ...]:
    draw = random.Random(NUM_TEXTS)
    texts = [*SPACES, *SPACE_CHARACTERS, *CONTROLS, *LOOK_ALIKES, *CODE, *SYMBOLS, *SCRIPTS]
    pieces = [word for text in (*SCRIPTS, *SYMBOLS, *CODE) for word in text.split(" ")] + [
        *SPACES, *SPACE_CHARACTERS, *CONTROLS, *LOOK_ALIKES
    ]  # fmt: skip
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    while len(texts) < NUM_TEXTS - 50:
        texts.append("".join(draw.choice(pieces) + draw.choice(_GLUE) for _ in range(draw.randint(2, 12))))
    while len(texts) < NUM_TEXTS - 20:
        texts.append("".join(draw.choices(characters[: draw.choice((0x100, 0x800, 0x3000, 0x20000))], k=40)))
    while len(texts) < NUM_TEXTS:
        texts.append(draw.choice(("\n", " ", "\n\n")).join(draw.choices((*SCRIPTS, *CODE, *SYMBOLS), k=6)))
    return tuple(texts)


TEXTS = _mixed()
"""Ordered by kind; those that are put together come last."""
assert len(TEXTS) == NUM_TEXTS
