"""A GGUF file takes the place of a folder wherever a model is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gguf_models.conversion import write_converted
from tests.tiny_models import save_random
from tools.bench.gguf.container import Setting
from transformers import LlamaConfig

from ferryman.errors import ConfigError
from ferryman.llm import LLM
from ferryman.model.footprint import weight_bytes
from ferryman.model.load_options import LoadOptions
from ferryman.schedule.request import SamplingParams
from ferryman.sizing.worker_size import model_files, stored_dtype
from ferryman_cli.app import run
from ferryman_launcher.options import check_model_folder
from ferryman_router.served_model import ServedModel

CONFIG = LlamaConfig(
    vocab_size=258,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)
VOCABULARY: dict[str, Setting] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))],
    "tokenizer.ggml.scores": [0.0] * 258,
    "tokenizer.ggml.token_type": [2, 3, *[6] * 256],
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "{{ messages[0].content }}",
    "general.sampling.temp": 0.5,
}
PROMPTS = ([5, 9, 200, 31, 7], [77, 12, 3] * 9)


@pytest.fixture
def folder_and_file(tmp_path: Path) -> tuple[Path, Path]:
    folder = tmp_path / "folder"
    save_random(folder, CONFIG, seed=3)
    return folder, write_converted(folder, tmp_path / "tiny.gguf", "llama", VOCABULARY)


def test_greedy_tokens_are_those_of_the_folder(folder_and_file: tuple[Path, Path]) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    answers = []
    for model in folder_and_file:
        with LLM(model=model, dtype="float32", page_size=16, memory_bytes=4 << 20) as llm:
            answers.append([completion.token_ids for completion in llm.generate(PROMPTS, params)])
    assert answers[0] == answers[1]
    assert all(answers[1])


def test_the_router_serves_the_file_by_its_name(folder_and_file: tuple[Path, Path]) -> None:
    _, file = folder_and_file
    served = ServedModel.load(file, "", created_unix_seconds=0)
    assert (served.model_id, served.family, served.vocab) == ("tiny", "LlamaForCausalLM", 258)
    assert (served.max_len, served.defaults) == (512, {"temperature": 0.5})
    assert served.tokenizer.encode_chat([{"role": "user", "content": "ab"}]).tolist() == [99, 100]


def test_weights_are_counted_before_they_are_read(folder_and_file: tuple[Path, Path]) -> None:
    options = LoadOptions("bfloat16", page_size=16)
    counted = [
        weight_bytes(files.folder, files.tensors, options)
        for files in map(model_files, folder_and_file)
    ]
    assert counted[0] == counted[1]
    assert stored_dtype(model_files(folder_and_file[1])) == "float32"


def test_fit_counts_a_file(
    folder_and_file: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", str(folder_and_file[1]), "--dtype", "float32"]) == 0
    assert "tiny: " in capsys.readouterr().out


def test_a_name_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder, and no such GGUF file"):
        check_model_folder(tmp_path / "none.gguf")
