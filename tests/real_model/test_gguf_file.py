"""SmolLM2's published GGUF file is served as it is: Q4_1 and Q8_0 stay in their codes.

The yardstick reads the file by the format's description and multiplies in transformers, so nothing
of ours makes a number of it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.model.paged_run import PagedRun, Part
from tests.tools.bench.gguf_reader import GgufReader, ReadTensor
from tools.bits.smollm2 import QUESTIONS, made_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ferryman.llm import LLM
from ferryman.model.footprint import held_bytes
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.schedule.request import SamplingParams
from ferryman.text.tokenizer import Tokenizer
from ferryman_kernels.products.packed_product import reads_panels

pytestmark = pytest.mark.slow

MAX_LOGIT_DIFFERENCE = 1e-3
"""In float32, of logits that reach 30: sums of up to 1,536 products, in another order."""
NUM_CHATS, NUM_TOKENS = 4, 24
F32, Q4_1, Q8_0 = 0, 3, 8
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return made_file()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def yardstick(file: Path) -> LlamaForCausalLM:
    """The model in float32, its numbers by ggml's description of a block."""
    settings, tensors = GgufReader(file).read()
    sizes = {key.removeprefix("llama."): value for key, value in settings.items()}
    heads = {"attn_q": sizes["attention.head_count"], "attn_k": sizes["attention.head_count_kv"]}
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["embedding_length"],
        num_hidden_layers=sizes["block_count"],
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        intermediate_size=sizes["feed_forward_length"],
        max_position_embeddings=sizes["context_length"],
        rms_norm_eps=sizes["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": sizes["rope.freq_base"]},
        tie_word_embeddings=True,
    )
    weights = {}
    for name, tensor in tensors.items():
        block, _, part = name.removeprefix("blk.").partition(".")
        kind = part.removesuffix(".weight")
        values = numbers(tensor)
        if kind in heads:
            # The file has the two halves of a head's channels in turn.
            by_pair = values.view(heads[kind], -1, 2, values.shape[1])
            values = by_pair.transpose(1, 2).reshape(values.shape)
        weights[ENDS.get(name) or f"model.layers.{block}.{NAMES[kind]}.weight"] = values
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


def numbers(tensor: ReadTensor) -> Tensor:
    """The numbers of a tensor, its outermost axis first."""
    shape = tensor.sizes[::-1]
    count = int(np.prod(shape))
    if tensor.kind == F32:
        return torch.tensor(np.frombuffer(tensor.content, "<f4", count)).view(shape)
    blocks = count // 32
    if tensor.kind == Q8_0:
        eight = np.frombuffer(tensor.content, np.dtype([("d", "<f2"), ("q", "i1", 32)]), blocks)
        values = eight["d"].astype("f4")[:, None] * eight["q"]
    else:
        assert tensor.kind == Q4_1
        kind = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
        four = np.frombuffer(tensor.content, kind, blocks)
        codes = np.concatenate([four["q"] & 15, four["q"] >> 4], axis=1)
        d, m = (four[field].astype("f4")[:, None] for field in ("d", "m"))
        values = d * codes + m
    return torch.tensor(values.astype("f4")).view(shape)


@pytest.fixture(scope="module")
def prompts(file: Path) -> list[list[int]]:
    tokenizer = Tokenizer.load(file)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:NUM_CHATS]]
    return [tokenizer.encode_chat(chat).tolist() for chat in chats]


@pytest.fixture(scope="module")
def answers(file: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy, in float32."""
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    with LLM(model=file, dtype="float32", memory_bytes=128 << 20) as llm:
        return [list(answer.token_ids) for answer in llm.generate(prompts, greedy)]


def test_greedy_tokens_and_logits_are_those_of_the_numbers_in_the_file(
    file: Path,
    yardstick: LlamaForCausalLM,
    prompts: list[list[int]],
    answers: list[list[int]],
) -> None:
    model = load_model(file, LoadOptions("float32", page_size=16))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        token_ids = [*prompt, *answer[:-1]]
        with torch.inference_mode():
            expected = yardstick(torch.tensor([token_ids])).logits[0, len(prompt) - 1 :]
        assert expected.std() > 1
        run = PagedRun(model)
        lane = run.start()
        actual = [run.prefill([Part(lane, prompt)])[0][-1:]]
        actual += [run.decode([lane], [token]) for token in answer[:-1]]
        difference = (torch.cat(actual) - expected).abs().max()
        assert difference <= MAX_LOGIT_DIFFERENCE, difference
        # Where two tokens are nearer to each other than that, either is right.
        drawn = expected.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (expected.amax(1) - drawn <= 2 * MAX_LOGIT_DIFFERENCE).all()


def test_an_answer_in_bfloat16_knows_the_capital(file: Path) -> None:
    prompt = Tokenizer.load(file).encode_chat(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    with LLM(model=file, memory_bytes=128 << 20) as llm:
        (answer,) = llm.generate([prompt.tolist()], SamplingParams(max_tokens=12, temperature=0.0))
    assert "Paris" in answer.text


@pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_hold_at_most_a_tenth_more_than_the_file(file: Path, dtype: str) -> None:
    model = load_model(file, LoadOptions(dtype))
    size = file.stat().st_size
    assert 0.9 * size < held_bytes(model, is_on_cpu=True) <= 1.1 * size
