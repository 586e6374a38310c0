"""Formulas of Megatron-LM's papers (arXiv:2104.04473, arXiv:2201.11990) for GPT models, which have MLPs of four times the
width."""


def hardware_flops(*, sequences: int, seq_len: int, num_layers: int, embed_dim: int, vocab_size: int) -> float:
    """Returns the FLOPs of a step in which all layers run their forward pass twice: `96 B s L h^2 (1 + s/6h + v/16Lh)`."""
    layers = 96.0 * sequences * seq_len * num_layers * embed_dim**2
    return layers * (1 + seq_len / (6 * embed_dim) + vocab_size / (16 * num_layers * embed_dim))


def model_flops(*, sequences: int, seq_len: int, num_layers: int, embed_dim: int, vocab_size: int) -> float:
    """Returns the FLOPs of a step without recomputation: `72 B s L h^2 (1 + s/6h + v/12Lh)`."""
    layers = 72.0 * sequences * seq_len * num_layers * embed_dim**2
    return layers * (1 + seq_len / (6 * embed_dim) + vocab_size / (12 * num_layers * embed_dim))
