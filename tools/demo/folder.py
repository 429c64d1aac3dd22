"""The model folder, in the form that transformers and Ferryman load."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer
from tools.demo.network import DemoShape, Network
from tools.demo.vocabulary import END, PAD, save_tokenizer, token_id


def settings(shape: DemoShape, tokenizer: Tokenizer) -> dict[str, object]:
    """The contents of config.json."""
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "dtype": "float32",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "shared_intermediate_size": shape.mlp,
        "num_hidden_layers": len(shape.layers),
        "layer_types": list(shape.layers),
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "position_embedding_type": "nope",
        "max_position_embeddings": 8192,
        "mamba_n_heads": shape.ssm_heads,
        "mamba_d_head": shape.ssm_head_dim,
        "mamba_d_state": shape.ssm_state,
        "mamba_d_conv": shape.conv_width,
        "mamba_expand": shape.ssm_inner // shape.hidden,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 64,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "embedding_multiplier": shape.embedding_multiplier,
        "residual_multiplier": shape.residual_multiplier,
        "attention_multiplier": shape.attention_multiplier,
        "logits_scaling": shape.logits_scaling,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": token_id(tokenizer, END),
        "pad_token_id": token_id(tokenizer, PAD),
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    """Writes indented JSON with a newline at the end."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def save_model(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the whole folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", settings(network.shape, tokenizer))
    generation: dict[str, object] = {
        "do_sample": False,
        "temperature": 0.0,  # servers read this and not the line above
        "eos_token_id": token_id(tokenizer, END),
        "pad_token_id": token_id(tokenizer, PAD),
    }
    write_json(folder / "generation_config.json", generation)
    save_tokenizer(tokenizer, folder)
    weights = {name: value.detach().contiguous() for name, value in network.state_dict().items()}
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it readable for its owner only
