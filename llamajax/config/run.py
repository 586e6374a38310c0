"""Every setting of a run, as frozen dataclasses; the text under a field is its `--help`.

A section checks itself when it is built; `Config.problems` checks what only shows between sections.
Derived numbers are properties and are never written back. Only the standard library is imported
here, so that `--help`, launchers and tools need no jax.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llamajax.errors import ConfigError

DType = Literal["float32", "bfloat16"]


def require(*rules: tuple[bool, str]) -> None:
    """Raises `ConfigError` with one `key: rule; remedy` line for every rule that does not hold."""
    broken = [message for holds, message in rules if not holds]
    if broken:
        raise ConfigError("\n".join(broken))


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """How rotary frequencies are stretched beyond the length the model was first trained on."""

    kind: Literal["none", "linear", "llama3"] = "none"
    """`none`: plain RoPE. `linear`: all frequencies divided by `factor`. `llama3`: only the long wavelengths."""
    factor: float = 1.0
    """Stretch of the long wavelengths."""
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths above `original_max_seq_len / low_freq_factor` are fully stretched."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths below `original_max_seq_len / high_freq_factor` are left alone."""
    original_max_seq_len: int = 8192
    """`llama3`: tokens per sequence of the pretraining that the stretch starts from."""

    def __post_init__(self) -> None:
        require(
            (self.factor >= 1.0, f"factor: {self.factor} must be at least 1.0"),
            (
                self.kind != "none" or self.factor == 1.0,
                f"factor: {self.factor} has no effect with kind=none; set kind to linear or llama3, or remove factor",
            ),
            (
                0 < self.low_freq_factor < self.high_freq_factor,
                f"low_freq_factor: {self.low_freq_factor} must be between 0 and high_freq_factor={self.high_freq_factor}",
            ),
            (self.original_max_seq_len > 0, f"original_max_seq_len: {self.original_max_seq_len} must be positive"),
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A LLaMA decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; and what Mistral and Qwen change."""

    vocab_size: int
    """Rows of the embedding table; at least the tokenizer's number of pieces."""
    embed_dim: int
    """Width of the residual stream."""
    mlp_dim: int
    """Width of the SwiGLU hidden layer."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads per layer."""
    num_kv_heads: int
    """Key/value heads per layer; `num_heads` for multi-head attention, fewer for grouped-query attention."""
    head_dim: int
    """Width of one head; need not be `embed_dim / num_heads`."""
    max_seq_len: int = 4096
    """Longest sequence the model is meant for, tokens."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    """Stretch of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm."""
    sliding_window: int | None = None
    """Newest tokens, itself included, that a token sees (Mistral); unset: all before it."""
    attend_across_documents: bool = False
    """A token sees all before it in its row, whatever document they are of, as Llama 2 and GPT-3 were trained;
    otherwise only its own document, as Llama 3 was."""
    qkv_bias: bool = False
    """Add learned biases to queries, keys and values (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm every head's queries and keys before they are turned by their positions (Qwen3)."""
    tie_embeddings: bool = False
    """Use the embedding table as the output head."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; residual outputs use `init_std / sqrt(2 * num_layers)`."""
    param_dtype: DType = "float32"
    """Type of the master weights. bfloat16 halves them, but loses every update below 1/512 of its weight, which most of
    fine-tuning's are; gradients are summed in float32 either way."""
    compute_dtype: DType = "bfloat16"
    """Type of activations, matmuls and the weight copies that collectives carry."""
    attention_kernel: Literal["auto", "cudnn", "plain"] = "auto"
    """What computes attention while training: `cudnn` is one fused kernel on NVIDIA GPUs, for rows that are not split
    (mesh.sequence 1) and whose documents see each other; `plain` runs everywhere; `auto` is cudnn where it can be."""
    remat: Literal["none", "save_attention_qkv_mlp", "save_attention_qkv", "save_attention", "full"] = "full"
    """What the backward pass recomputes: `none` keeps everything, `full` keeps each layer's input only,
    `save_*` also keep the named matmul outputs."""

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_seq_len",
        )  # fmt: skip
        require(
            *((getattr(self, name) > 0, f"{name}: {getattr(self, name)} must be positive") for name in sizes),
            (
                min(self.num_heads, self.num_kv_heads) <= 0 or self.num_heads % self.num_kv_heads == 0,
                f"num_kv_heads: {self.num_kv_heads} must divide num_heads={self.num_heads}",
            ),
            (
                self.head_dim <= 0 or self.head_dim % 2 == 0,
                f"head_dim: {self.head_dim} must be even: rotary positions turn pairs",
            ),
            (self.rope_theta > 0, f"rope_theta: {self.rope_theta} must be positive"),
            (self.norm_eps > 0, f"norm_eps: {self.norm_eps} must be positive"),
            (self.init_std > 0, f"init_std: {self.init_std} must be positive"),
            (
                self.sliding_window is None or self.sliding_window > 0,
                f"sliding_window: {self.sliding_window} must be positive or unset",
            ),
        )

    @property
    def num_matmul_params(self) -> int:
        """Parameters that take part in a matmul: all but norms and the input embedding; the head counts."""
        attention = self.embed_dim * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.embed_dim * self.mlp_dim
        return self.num_layers * (attention + mlp) + self.vocab_size * self.embed_dim

    @property
    def num_params(self) -> int:
        norms = (2 * self.num_layers + 1) * self.embed_dim
        qk_norms = 2 * self.num_layers * self.head_dim if self.qk_norm else 0
        biases = self.num_layers * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        embedding = 0 if self.tie_embeddings else self.vocab_size * self.embed_dim
        return self.num_matmul_params + norms + qk_norms + biases + embedding

    def undivided(self, axes: Mapping[str, int]) -> list[str]:
        """What of the model does not divide over mesh axes of these sizes: one line each."""
        divisions = (("embed_dim", "fsdp"), ("num_kv_heads", "tensor"), ("mlp_dim", "tensor"), ("vocab_size", "tensor"))
        return [
            f"model.{name}: {getattr(self, name)} must be divisible by mesh.{axis}={axes[axis]}"
            for name, axis in divisions
            if getattr(self, name) % axes[axis]
        ]

    def flops_per_token(self, seq_len: int, *, full_attention: bool = False) -> int:
        """Training FLOPs per token (forward and backward); recomputation is never counted.

        Six per matmul parameter, plus attention scores and values: `6*L*N*H*seq_len` when only the causal half
        counts, `12*L*N*H*seq_len` when the full square does (PaLM, arXiv:2204.02311, appendix B). A sliding window W
        leaves `2*W - W**2/seq_len` of the former's `seq_len`, and W of the latter's.
        """
        window = min(self.sliding_window or seq_len, seq_len)
        keys = 2 * window if full_attention else 2 * window - window**2 // seq_len
        return 6 * self.num_matmul_params + 6 * self.num_layers * self.num_heads * self.head_dim * keys


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices lie along each mesh axis; `-1` on one axis takes the rest."""

    data: int = 1
    """Data-parallel replicas of the whole (sharded) state."""
    fsdp: int = -1
    """Shards of parameters, gradients and optimizer state (ZeRO); also splits the batch."""
    sequence: int = 1
    """Shards of the sequence (context parallelism)."""
    tensor: int = 1
    """Shards of heads, MLP and vocabulary (tensor parallelism)."""
    num_cpu_devices: int | None = None
    """Emulate this many devices per process on the CPU; unset: use the accelerators that jax finds."""

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        num_cpu_devices = sizes.pop("num_cpu_devices")
        automatic = [axis for axis, size in sizes.items() if size == -1]
        chosen = [axis for axis in automatic if axis != "fsdp"]  # which is -1 by default, so not the line to point at
        require(
            *(
                (size == -1 or size > 0, f"{axis}: {size} must be positive, or -1 for the rest")
                for axis, size in sizes.items()
            ),
            (
                len(automatic) <= 1,
                f"{''.join(chosen[:1])}: {' and '.join(automatic)} are both -1; only one axis can take the rest",
            ),
            (
                num_cpu_devices is None or num_cpu_devices > 0,
                f"num_cpu_devices: {num_cpu_devices} must be positive or unset",
            ),
        )

    def axis_sizes(self, num_devices: int) -> dict[str, int]:
        """The size of every configured axis on `num_devices` devices, the automatic one resolved.

        Raises:
            ConfigError: the sizes do not multiply to `num_devices`.
        """
        sizes = {"data": self.data, "fsdp": self.fsdp, "sequence": self.sequence, "tensor": self.tensor}
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if -1 in sizes.values():
            if num_devices % fixed:
                raise ConfigError(f"mesh: {self._product()} = {fixed} does not divide the {num_devices} devices")
            return {axis: num_devices // fixed if size == -1 else size for axis, size in sizes.items()}
        if fixed != num_devices:
            raise ConfigError(
                f"mesh: {self._product()} = {fixed}, but there are {num_devices} devices; set one axis to -1 for the rest"
            )
        return sizes

    def _product(self) -> str:
        sizes = {"data": self.data, "fsdp": self.fsdp, "sequence": self.sequence, "tensor": self.tensor}
        return " x ".join(f"{axis}({size})" for axis, size in sizes.items() if size != -1)


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Several processes (hosts) in one run, joined by jax.distributed."""

    enabled: bool = False
    """Join the other processes; under Slurm and Open MPI the addresses below are found by themselves."""
    coordinator_address: str | None = None
    """`host:port` of process 0; unset: found from the launcher's environment."""
    num_processes: int | None = None
    """Processes in the run; unset: LLAMAJAX_NUM_PROCESSES, else found from the launcher's environment."""
    process_id: int | None = None
    """Rank of this process; unset: LLAMAJAX_PROCESS_ID, else found from the launcher's environment."""
    heartbeat_timeout_s: int = 30
    """Seconds without a sign of life after which a process counts as lost."""
    initialization_timeout_s: int = 300
    """Seconds to wait for all processes at the start."""

    def __post_init__(self) -> None:
        require(
            (self.heartbeat_timeout_s > 0, f"heartbeat_timeout_s: {self.heartbeat_timeout_s} must be positive"),
            (
                self.initialization_timeout_s > 0,
                f"initialization_timeout_s: {self.initialization_timeout_s} must be positive",
            ),
            (
                self.num_processes is None or self.num_processes > 0,
                f"num_processes: {self.num_processes} must be positive or unset",
            ),
            (
                self.process_id is None or self.process_id >= 0,
                f"process_id: {self.process_id} must not be negative",
            ),
            (
                self.process_id is None or self.num_processes is None or self.process_id < self.num_processes,
                f"process_id: {self.process_id} must be below num_processes={self.num_processes}",
            ),
            *(
                (
                    self.enabled or getattr(self, name) is None,
                    f"{name}: has no effect unless enabled is true; set it, or remove this",
                )
                for name in ("coordinator_address", "num_processes", "process_id")
            ),
        )


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One collection of documents."""

    kind: Literal["text", "jsonl", "parquet", "stdlib", "chat"]
    """`text`: one document per file, cut at line ends above two million characters. `jsonl` (also .gz,
    .zst) and `parquet`: one per line or row. `stdlib`: the sources and help texts of the Python standard
    library that runs this program. `chat`: one conversation per line of JSONL (also .gz, .zst), put into
    `data.chat_template`; only what the assistant says is learnt."""
    paths: tuple[str, ...] = ()
    """Files or globs (`**` allowed), relative to the working directory; empty for `stdlib`. A file that has several
    names here, by links or overlapping globs, is read once; to read one more often, raise `weight`."""
    text_key: str = "text"
    """`jsonl`, `parquet`: the field or column with the text."""
    chat_format: Literal["messages", "sharegpt", "alpaca"] = "messages"
    """`chat`: how a line holds its conversation. `messages`: a list of {role, content}. `sharegpt`: `conversations`, a
    list of {from, value}, and perhaps `system`. `alpaca`: instruction, output, and perhaps input and system."""
    max_bad_records: int = 0
    """`jsonl`, `parquet`, `chat`: lines or rows that may be left out, and are counted, because they are not what they
    should be (text that is null, broken JSON, a conversation that the template refuses); one more ends the start."""
    weight: float = 1.0
    """Share of the training rows that comes from this source, relative to the other sources' weights."""

    def __post_init__(self) -> None:
        require(
            (self.max_bad_records >= 0, f"max_bad_records: {self.max_bad_records} must not be negative"),
            (
                self.kind not in ("text", "stdlib") or self.max_bad_records <= 0,
                f"max_bad_records: {self.max_bad_records} has no effect with kind={self.kind}; remove it",
            ),
            (self.weight > 0, f"weight: {self.weight} must be positive; remove the source to leave it out"),
            (
                self.kind == "stdlib" or bool(self.paths),
                f"paths: kind={self.kind} needs them; name the files or globs to read",
            ),
            (self.kind != "stdlib" or not self.paths, "paths: kind=stdlib finds its own files; remove paths"),
            (bool(self.text_key), "text_key: must not be empty"),
            (
                self.kind != "chat" or self.text_key in ("", "text"),
                f"text_key: {self.text_key} has no effect with kind=chat; set chat_format, or remove text_key",
            ),
            (
                self.kind == "chat" or self.chat_format == "messages",
                f"chat_format: {self.chat_format} has no effect with kind={self.kind}; use kind=chat, or remove chat_format",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text to token ids."""

    path: str | None = None
    """A SentencePiece `tokenizer.model` or Hugging Face `tokenizer.json`, with what lies beside it; unset: train a
    SentencePiece BPE of `model.vocab_size` pieces on the training documents."""
    train_max_bytes: int = 10_000_000
    """Bytes of text, spread over all training documents, that a tokenizer is trained on."""

    def __post_init__(self) -> None:
        require((self.train_max_bytes > 0, f"train_max_bytes: {self.train_max_bytes} must be positive"))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Documents to training rows."""

    sources: tuple[SourceConfig, ...]
    """Collections of documents, mixed by weight."""
    seq_len: int
    """Tokens per row; documents are packed into rows and see only themselves."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Text to token ids."""
    chat_template: str | None = None
    """`chat` sources: a Jinja file that turns a conversation into text, as Hugging Face tokenizers have it; unset: the
    one beside the tokenizer."""
    held_out_fraction: float = 0.01
    """Share of the documents, chosen by a hash of their text without the white space at its ends, that is never trained
    on and used to evaluate; copies of a text, and the pieces of a long one, are on the same side."""
    cache_dir: str = "~/.cache/llamajax"
    """Where tokenized documents are kept, addressed by their content; shared between runs."""
    prefetch_steps: int = 2
    """Steps whose batches are prepared ahead of the device."""

    def __post_init__(self) -> None:
        require(
            (bool(self.sources), "sources: must not be empty; name at least one, for example [{kind: stdlib}]"),
            (self.seq_len > 0, f"seq_len: {self.seq_len} must be positive"),
            (
                self.chat_template is None or any(source.kind == "chat" for source in self.sources),
                "chat_template: has no effect without a source of kind=chat; add one, or remove chat_template",
            ),
            (
                0 <= self.held_out_fraction < 1,
                f"held_out_fraction: {self.held_out_fraction} must be at least 0 and below 1",
            ),
            (self.prefetch_steps > 0, f"prefetch_steps: {self.prefetch_steps} must be positive"),
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a schedule (Loshchilov & Hutter, arXiv:1711.05101)."""

    learning_rate: float
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """After the warm-up: `constant`; `linear` or `cosine` decay to the end of the run; `wsd` stays at the peak and
    decays linearly over the last `decay_steps`."""
    warmup_steps: int = 0
    """Steps of linear warm-up from zero."""
    decay_steps: int | None = None
    """`wsd`: steps of the final decay."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of a decay, as a share of the peak."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, scaled by the learning rate."""
    no_weight_decay: tuple[str, ...] = ("norm", "bias")
    """Parameters whose path contains one of these names are not decayed."""
    grad_clip_norm: float | None = 1.0
    """Global L2 norm that gradients are clipped to; unset: no clipping."""
    moment_dtype: DType = "float32"
    """Type the moments are kept in between steps; `bfloat16` halves their memory and wants `b2` at most 0.98."""

    def __post_init__(self) -> None:
        require(
            (self.learning_rate > 0, f"learning_rate: {self.learning_rate} must be positive"),
            (self.warmup_steps >= 0, f"warmup_steps: {self.warmup_steps} must not be negative"),
            (
                self.schedule != "wsd" or self.decay_steps is not None,
                "schedule: wsd needs decay_steps; set it to the steps of the final decay",
            ),
            (
                self.schedule == "wsd" or self.decay_steps is None,
                f"decay_steps: {self.decay_steps} has no effect with schedule={self.schedule}; use wsd or remove it",
            ),
            (
                self.decay_steps is None or self.decay_steps > 0,
                f"decay_steps: {self.decay_steps} must be positive",
            ),
            (0 <= self.min_lr_ratio <= 1, f"min_lr_ratio: {self.min_lr_ratio} must be between 0 and 1"),
            (0 <= self.b1 < 1, f"b1: {self.b1} must be at least 0 and below 1"),
            (0 <= self.b2 < 1, f"b2: {self.b2} must be at least 0 and below 1"),
            (self.eps > 0, f"eps: {self.eps} must be positive"),
            (self.weight_decay >= 0, f"weight_decay: {self.weight_decay} must not be negative"),
            (
                self.grad_clip_norm is None or self.grad_clip_norm > 0,
                f"grad_clip_norm: {self.grad_clip_norm} must be positive, or unset for no clipping",
            ),
            (
                self.moment_dtype == "float32" or self.b2 <= 0.98,
                f"moment_dtype: bfloat16 loses b2={self.b2}: changes below 1/256 round away; use b2 <= 0.98 or float32",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The length and the arithmetic of the run."""

    num_steps: int
    """Optimizer steps."""
    global_batch_size: int
    """Sequences per optimizer step, over all devices."""
    grad_accum_steps: int = 1
    """Micro-batches that one optimizer step is summed over."""
    z_loss_weight: float = 0.0
    """Weight of the squared log-partition added to the loss (PaLM, arXiv:2204.02311, section 5)."""
    max_nonfinite_steps: int = 5
    """Steps with non-finite gradients in a row after which the run stops; each is skipped and counted."""
    eval_every: int | None = None
    """Steps between evaluations on held-out documents; unset: only after the last step."""
    eval_batches: int = 16
    """Batches per evaluation, the same ones every time; 0: no evaluation."""

    def __post_init__(self) -> None:
        require(
            (self.num_steps > 0, f"num_steps: {self.num_steps} must be positive"),
            (self.global_batch_size > 0, f"global_batch_size: {self.global_batch_size} must be positive"),
            (self.grad_accum_steps > 0, f"grad_accum_steps: {self.grad_accum_steps} must be positive"),
            (
                min(self.grad_accum_steps, self.global_batch_size) <= 0
                or self.global_batch_size % self.grad_accum_steps == 0,
                f"grad_accum_steps: {self.grad_accum_steps} must divide global_batch_size={self.global_batch_size}",
            ),
            (self.z_loss_weight >= 0, f"z_loss_weight: {self.z_loss_weight} must not be negative"),
            (self.max_nonfinite_steps > 0, f"max_nonfinite_steps: {self.max_nonfinite_steps} must be positive"),
            (self.eval_every is None or self.eval_every > 0, f"eval_every: {self.eval_every} must be positive or unset"),
            (self.eval_batches >= 0, f"eval_batches: {self.eval_batches} must not be negative"),
            (
                self.eval_every is None or self.eval_batches > 0,
                f"eval_every: {self.eval_every} needs eval_batches above 0",
            ),
        )

    @property
    def num_rows(self) -> int:
        """Sequences of all steps."""
        return self.num_steps * self.global_batch_size


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept of the run, and how often."""

    save_every: int | None = 1000
    """Steps between checkpoints; unset: only after the last step (and on SIGTERM). One that cannot be written is told at
    once and tried again after 1, 2, 4, ... steps; the last one for some seconds, then the run ends with exit code 74."""
    keep_last: int = 3
    """Newest checkpoints kept."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are kept for good."""
    async_save: bool = True
    """Write in the background while training goes on."""
    allow_config_change: bool = False
    """Resume although settings that change the result differ from those the run was started with."""

    def __post_init__(self) -> None:
        save_every, keep_every = self.save_every or 0, self.keep_every or 0
        require(
            (self.save_every is None or self.save_every > 0, f"save_every: {self.save_every} must be positive or unset"),
            (self.keep_last > 0, f"keep_last: {self.keep_last} must be positive"),
            (self.keep_every is None or self.keep_every > 0, f"keep_every: {self.keep_every} must be positive or unset"),
            (
                min(save_every, keep_every) <= 0 or keep_every % save_every == 0,
                f"keep_every: {keep_every} must be a multiple of save_every={save_every}",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What is shown and where; metrics.jsonl in the run directory has every step. While its disk is full, up to 100,000
    records wait in memory."""

    log_every: int = 10
    """Steps between lines on a terminal that is not interactive; the progress bar follows every step."""
    tensorboard: bool = False
    """Also write TensorBoard event files to the run directory."""
    wandb: bool = False
    """Also log to Weights & Biases (extra `wandb`)."""
    wandb_project: str = "llamajax"
    """Project on Weights & Biases."""

    def __post_init__(self) -> None:
        require((self.log_every > 0, f"log_every: {self.log_every} must be positive"))


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A device trace for xprof and Perfetto, written to `profile/` in the run directory."""

    start_step: int | None = None
    """First traced step, the first of the run being 1; unset: no trace."""
    num_steps: int = 3
    """Traced steps."""

    def __post_init__(self) -> None:
        require(
            (self.start_step is None or self.start_step > 0, f"start_step: {self.start_step} must be positive or unset"),
            (self.num_steps > 0, f"num_steps: {self.num_steps} must be positive"),
        )


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """A text the model writes after the last step."""

    prompt: str | None = None
    """Text to continue; unset: no sample."""
    max_tokens: int = 64
    """Tokens to write."""
    temperature: float = 0.8
    """Randomness; 0 always takes the likeliest token."""

    def __post_init__(self) -> None:
        require(
            (self.max_tokens > 0, f"max_tokens: {self.max_tokens} must be positive"),
            (self.temperature >= 0, f"temperature: {self.temperature} must not be negative"),
        )


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """The machines that `llamajax.plan` plans for; training takes the devices that jax finds and ignores this."""

    gpu: Literal["none", "a100-40gb", "a100-80gb", "h100", "h200"] = "none"
    """GPU of every node, all of them SXM modules; `none`: there is nothing to plan for."""
    nodes: int = 1
    """Nodes: machines whose GPUs are joined by NVLink, and which a network joins."""
    gpus_per_node: int = 8
    """GPUs per node."""
    gpu_bandwidth: float | None = None
    """Bytes per second, each way, between one GPU and the others of its node; unset: the GPU's NVLink."""
    node_bandwidth: float | None = None
    """Bytes per second, each way, between one node and the network; unset: per GPU of the node 12.5e9 for A100 (four
    ports of 200 Gb/s for eight), 50e9 for H100 and H200 (a port of 400 Gb/s for each)."""
    price_per_gpu_hour: float | None = None
    """Price of one GPU for one hour, in any currency; unset: no prices in the plan."""
    token_budget: float | None = None
    """Tokens that time and price are told for; unset: those of `train.num_steps` steps."""

    def __post_init__(self) -> None:
        optional = ("gpu_bandwidth", "node_bandwidth", "price_per_gpu_hour", "token_budget")
        require(
            (self.nodes > 0, f"nodes: {self.nodes} must be positive"),
            (self.gpus_per_node > 0, f"gpus_per_node: {self.gpus_per_node} must be positive"),
            *(
                (value is None or value > 0, f"{name}: {value} must be positive or unset")
                for name in optional
                for value in [getattr(self, name)]
            ),
        )

    @property
    def num_devices(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, kw_only=True)
class XlaConfig:
    """What the compiler is told, by training and by plans alike; without effect on the CPU."""

    latency_profile: str | None = "auto"
    """Costs of the step's instructions, for the scheduler that hides communication: a file, or `auto` for what the cost
    model of `llamajax.plan` tells of the GPUs in `hardware`, where that makes the step faster; it takes two compilations
    more when a program is first trained. null: XLA's own guesses, as with `auto` where no GPU is named, or only one."""
    pipeline_gathers: bool = False
    """Gather a layer's weights while the one before computes, in one collective per layer; without effect before jaxlib
    0.11, which cannot. Some programs get faster by it, on slow networks above all: `llamajax.plan --alternatives` tells."""
    flags: tuple[str, ...] = ()
    """More XLA options, `name=value` each, over those that llamajax sets; for example
    [xla_gpu_enable_while_loop_double_buffering=true]. Lists are written as YAML. Plans leave `xla_dump_*` out."""

    def __post_init__(self) -> None:
        require(
            (self.latency_profile != "", "latency_profile: must not be empty; name a file, auto, or null for none"),
            *(
                (
                    flag.startswith("xla_") and "=" in flag and not flag.endswith("="),
                    f"flags: {flag!r} must be written xla_NAME=VALUE, without dashes in front",
                )
                for flag in self.flags
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """One complete run."""

    run_dir: str
    """Everything the run writes: config, checkpoints, metrics, report. The same command resumes it."""
    model: ModelConfig
    """The network."""
    data: DataConfig
    """What it is trained on."""
    train: TrainConfig
    """How long and with which batches."""
    optimizer: OptimizerConfig
    """How weights follow gradients."""
    init_from: str | None = None
    """Weights to start from: a run's directory, one of its checkpoints, or a Hugging Face directory. The optimizer
    starts fresh; the tokenizer comes along unless `data.tokenizer.path` names it. Unset: random weights."""
    seed: int = 0
    """Seed of the initial weights, the data order and the sample."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How the work is laid over the devices."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Several processes in one run."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is kept of the run."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """What is shown."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """A device trace."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """A text at the end."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    """What a plan is for."""
    xla: XlaConfig = field(default_factory=XlaConfig)
    """What the compiler is told."""

    def problems(self) -> list[str]:
        """What is wrong between sections, and over emulated or planned devices: one `key: rule; remedy` line each."""
        train, optimizer, data, model = self.train, self.optimizer, self.data, self.model
        last_traced = (self.profile.start_step or 0) + self.profile.num_steps - 1
        decaying = optimizer.warmup_steps + (optimizer.decay_steps or 0)
        rules = (
            (bool(self.run_dir), "run_dir: must not be empty"),
            (0 <= self.seed < 2**32, f"seed: {self.seed} must be at least 0 and below 2**32"),
            (
                data.seq_len <= model.max_seq_len,
                f"data.seq_len: {data.seq_len} is above model.max_seq_len={model.max_seq_len}; shorten the rows or raise it",
            ),
            (
                decaying <= train.num_steps,
                f"optimizer.warmup_steps: warm-up and decay take {decaying} steps, above train.num_steps={train.num_steps}",
            ),
            (
                self.profile.start_step is None or last_traced <= train.num_steps,
                f"profile.start_step: steps {self.profile.start_step} to {last_traced} reach beyond"
                f" train.num_steps={train.num_steps}",
            ),
            (
                train.eval_every is None or data.held_out_fraction > 0,
                "train.eval_every: there is nothing to evaluate on with data.held_out_fraction=0",
            ),
        )
        problems = [message for holds, message in rules if not holds]
        if self.mesh.num_cpu_devices is not None and not self.distributed.enabled:
            problems += self.placement_problems(self.mesh.num_cpu_devices)
        elif self.mesh.num_cpu_devices is None and self.hardware.gpu != "none":
            planned = self.hardware
            where = f"hardware: {planned.nodes} nodes x {planned.gpus_per_node} GPUs; gpu: none leaves it out"
            problems += [f"{problem} ({where})" for problem in self.placement_problems(planned.num_devices)]
        return problems

    def placement_problems(self, num_devices: int) -> list[str]:
        """What does not divide over `num_devices` devices: one `key: rule; remedy` line each."""
        try:
            axes = self.mesh.axis_sizes(num_devices)
        except ConfigError as error:
            return [str(error)]
        train = self.train
        batch_shards = axes["data"] * axes["fsdp"]
        micro_batch_size = train.global_batch_size // train.grad_accum_steps
        nearest = max(1, round(micro_batch_size / batch_shards)) * batch_shards * train.grad_accum_steps
        problems = self.model.undivided(axes)
        if self.data.seq_len % axes["sequence"]:
            problems.append(f"data.seq_len: {self.data.seq_len} must be divisible by mesh.sequence={axes['sequence']}")
        if micro_batch_size % batch_shards:
            problems.append(
                f"train.global_batch_size: {train.global_batch_size} / grad_accum_steps({train.grad_accum_steps}) = "
                f"{micro_batch_size} sequences cannot be split over data({axes['data']}) x fsdp({axes['fsdp']}) = "
                f"{batch_shards} devices; the nearest batch that can is {nearest}"
            )
        return problems

    def batch_arithmetic(self, num_devices: int) -> str:
        """The batch in one line, for people to check."""
        axes = self.mesh.axis_sizes(num_devices)
        replicas = axes["data"] * axes["fsdp"]
        train, seq_len = self.train, self.data.seq_len
        tokens = train.global_batch_size * seq_len
        per_device = train.global_batch_size // replicas // train.grad_accum_steps
        return (
            f"global batch {train.global_batch_size} sequences x {seq_len} tokens = {tokens:,} tokens"
            f" = {per_device} per device x {replicas} data-parallel devices x {train.grad_accum_steps} accumulation steps"
        )
