"""Text to samples: tokenizers, corpora, and the order in which samples are fed."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from duomesh.core.batch import IGNORE
from duomesh.core.data.corpus import find_files, pack_tokens, read_corpus, token_dtype
from duomesh.core.data.sampler import Sampler, permute
from duomesh.core.data.tokenizer import ByteTokenizer, check_rows, load_tokenizer
from duomesh.core.errors import DataError

EOS = 257


def write_files(folder: Path, texts: dict[str, str | bytes]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def hf_tokenizer(folder: Path, num_base: int, num_added: int, eos: str | None = None) -> Path:
    """A word tokenizer of `num_base` words and `num_added` added tokens."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers library")
    words = {f"w{i}": i for i in range(num_base)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens([f"<s{i}>" for i in range(num_added)])
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    if eos:
        (folder / "tokenizer_config.json").write_text(f'{{"eos_token": {{"content": "{eos}"}}}}')
    return folder


# Tokenizers


@pytest.mark.parametrize("text", ["", "plain", "naïve 日本 🎉", "a\0b\n"])
def test_byte_tokenizer_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([256, *ids.tolist(), EOS]) == text


def test_byte_tokenizer_shows_a_cut_character() -> None:
    assert ByteTokenizer().decode("ab日".encode()[:-1]) == "ab\N{REPLACEMENT CHARACTER}"


def test_hf_tokenizer_reads_its_directory(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(hf_tokenizer(tmp_path / "t", 20, 2, eos="<s1>")))
    assert tokenizer.encode("w3 w19 w0").tolist() == [3, 19, 0]  # nothing added by itself
    assert (tokenizer.base_size, tokenizer.full_size, tokenizer.eos) == (20, 22, 21)
    assert tokenizer.fingerprint != load_tokenizer(str(hf_tokenizer(tmp_path / "u", 21, 2))).fingerprint


def test_c035_vocabulary_check_uses_full_length_against_model_rows(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(hf_tokenizer(tmp_path / "t", 500, 6)))
    check_rows(tokenizer, 512)
    check_rows(tokenizer, 506)
    with pytest.raises(DataError, match=r"500 .*506 .*504"):
        check_rows(tokenizer, 504)


def test_c132_missing_end_token_is_found_before_work(tmp_path: Path) -> None:
    folder = hf_tokenizer(tmp_path / "t", 20, 2)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.eos is None
    # the path does not exist: the tokenizer is complained about before any file is looked for
    with pytest.raises(DataError, match=rf"append_eos.*{folder}"):
        read_corpus([str(tmp_path / "absent")], tokenizer, append_eos=True)
    text = write_files(tmp_path / "text", {"a.txt": "w1 w2"})
    assert read_corpus([str(text)], tokenizer, append_eos=False).train.tolist() == [1, 2]


@pytest.mark.parametrize("content", [None, "{", '{"model": 3}'])
def test_unusable_tokenizer_directory_is_named(tmp_path: Path, content: str | None) -> None:
    pytest.importorskip("tokenizers", reason="needs the tokenizers library")
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match="absent"):
        load_tokenizer(str(tmp_path / "absent"))


# Corpora


@pytest.mark.parametrize(("vocab_size", "bits"), [(65499, 16), (65500, 32), (65536, 32), (65537, 32), (151936, 32)])
def test_c126_element_type_follows_the_vocabulary(vocab_size: int, bits: int) -> None:
    ids = [0, vocab_size - 1, 7]
    stream = pack_tokens([ids], vocab_size)
    assert stream.dtype == token_dtype(vocab_size) and stream.dtype.itemsize * 8 == bits
    assert stream.tolist() == ids


@pytest.mark.parametrize(("bad", "vocab_size"), [(70000, 60000), (300, 300), (-1, 300)])
def test_c126_ids_that_do_not_fit_are_refused(bad: int, vocab_size: int) -> None:
    with pytest.raises(DataError, match=f"document 1 holds token id {bad}.*{vocab_size}"):
        pack_tokens([[1, 2], [3, bad]], vocab_size)


def test_documents_are_sorted_closed_and_read_once(tmp_path: Path) -> None:
    folder = write_files(tmp_path, {"b.txt": "B", "a/z.txt": "Z", "a.txt": "A", "c.md": "C"})
    corpus = read_corpus([str(folder), str(folder / "b.txt")], ByteTokenizer(), patterns=["*.txt", "**/*.txt"])
    # one document a file, by path parts; the file named again does not count twice
    assert corpus.train.tolist() == [ord("Z"), EOS, ord("A"), EOS, ord("B"), EOS]
    assert corpus.num_documents == 3
    assert [f.name for f in find_files([str(folder / "c.md"), str(folder)], ["b*"])] == ["c.md", "b.txt"]


def test_c130_empty_and_binary_files_are_skipped_and_counted(tmp_path: Path) -> None:
    texts: dict[str, str | bytes] = {
        "a.txt": "abc",
        "empty": "",
        "spaces": " \n\t ",
        "latin": b"caf\xe9",
        "zero": b"a\0b",
        "bom": b"\xef\xbb\xbfx",
    }
    corpus = read_corpus([str(write_files(tmp_path, texts))], ByteTokenizer())
    assert corpus.train.tolist() == [*b"abc", EOS, ord("x"), EOS]
    assert corpus.skipped == {"empty": 2, "not UTF-8 text": 2}
    assert corpus.num_documents == 2


@pytest.mark.parametrize(
    ("names", "patterns", "match"),
    [
        (["empty"], ["**/*"], "no usable text.*1 empty"),
        (["absent.txt"], ["**/*"], "no file or folder .*absent.txt"),
        (["."], ["*.rst"], r"no file that matches \*.rst"),
    ],
)
def test_nothing_usable_is_an_error(tmp_path: Path, names: list[str], patterns: list[str], match: str) -> None:
    write_files(tmp_path, {"empty": ""})
    with pytest.raises(DataError, match=match):
        read_corpus([str(tmp_path / name) for name in names], ByteTokenizer(), patterns=patterns)


def test_tail_split_holds_out_the_end(tmp_path: Path) -> None:
    folder = write_files(tmp_path, {"a": "x" * 59, "b": "y" * 39})  # 100 tokens with the end tokens
    corpus = read_corpus([str(folder)], ByteTokenizer(), validation_fraction=0.25)
    whole = read_corpus([str(folder)], ByteTokenizer()).train
    assert len(corpus.validation) == 25
    assert np.concatenate([corpus.train, corpus.validation]).tolist() == whole.tolist()


def test_document_split_is_stable_and_keeps_copies_together(tmp_path: Path) -> None:
    texts = {f"{i:03}.txt": f"document number {i}" for i in range(200)}

    def held_out(folder: Path) -> set[bytes]:
        corpus = read_corpus([str(folder)], ByteTokenizer(), validation_fraction=0.3, validation_split="documents")
        assert corpus.num_documents + corpus.num_validation_documents == len(list(folder.iterdir()))
        return set(bytes(i if i < 256 else 10 for i in corpus.validation.tolist()).split(b"\n")) - {b""}

    first = held_out(write_files(tmp_path / "a", texts))
    assert 40 <= len(first) <= 80  # 60 expected; 6.5 is one standard deviation
    more = {**texts, **{f"copy-{name}": text for name, text in texts.items()}, "aaa": "another"}
    assert held_out(write_files(tmp_path / "b", more)) - {b"another"} == first


def test_validation_paths_leave_the_training_text_whole(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "train", {"a": "abc"})
    other = write_files(tmp_path / "val", {"v": "v"})
    corpus = read_corpus([str(folder)], ByteTokenizer(), validation_paths=[str(other)], validation_fraction=0.5)
    assert corpus.train.tolist() == [*b"abc", EOS]
    assert corpus.validation.tolist() == [ord("v"), EOS]
    assert (corpus.num_documents, corpus.num_validation_documents) == (1, 1)


def test_fingerprint_is_that_of_the_training_stream(tmp_path: Path) -> None:
    a, b, c = (
        read_corpus([str(write_files(tmp_path / name, {"f": text}))], ByteTokenizer()).fingerprint
        for name, text in (("a", "same"), ("b", "same"), ("c", "sane"))
    )
    assert a == b != c


# Samples


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 10, 16, 17, 97, 1000, 4097])
def test_permute_is_a_permutation(size: int) -> None:
    places = np.arange(size)
    whole = permute(places, size, 7, "x")
    assert sorted(whole.tolist()) == list(range(size))
    # any subset, in any order, is the same as the whole looked up
    some = np.array([size - 1, 0, size // 2])
    assert permute(some, size, 7, "x").tolist() == whole[some].tolist()
    if size > 16:
        assert whole.tolist() != places.tolist()
        assert whole.tolist() != permute(places, size, 8, "x").tolist()
        assert whole.tolist() != permute(places, size, 7, "y").tolist()


def test_permute_sends_every_place_everywhere() -> None:
    """Over 2000 seeds each of 25 (place, image) pairs of size 5 is expected 400 times, 18 is one standard deviation."""
    counts = np.zeros((5, 5), int)
    for seed in range(2000):
        counts[np.arange(5), permute(np.arange(5), 5, seed, "x")] += 1
    assert counts.min() > 310 and counts.max() < 490, counts


def test_permute_breaks_up_neighbours() -> None:
    whole = permute(np.arange(10_000), 10_000, 3, "x")
    steps = np.diff(whole)
    assert Counter(steps.tolist()).most_common(1)[0][1] < 12  # a rotation or a stride would repeat one difference
    assert abs(np.corrcoef(np.arange(10_000), whole)[0, 1]) < 0.05


def test_c134_samples_tile_the_stream_exactly_once() -> None:
    documents = np.split(np.arange(107), np.cumsum([70, 5, 1]))
    sampler = Sampler(pack_tokens(documents, 107), 32, shuffle=False)
    assert sampler.num_samples == 3
    batch = sampler.batch(sampler.sample_ids(0, 3))
    assert batch.tokens.dtype == batch.labels.dtype == np.int32
    assert (batch.labels == batch.tokens + 1).all()
    assert batch.labels[:-1, -1].tolist() == batch.tokens[1:, 0].tolist()
    assert batch.tokens.reshape(-1).tolist() == list(range(96))  # all but the tail, each once


@pytest.mark.parametrize("num_samples", [1, 2, 7, 50])
def test_c134_every_epoch_has_every_sample_once(num_samples: int) -> None:
    sampler = Sampler(np.arange(num_samples * 4 + 1), 4, seed=5)
    epochs = [sampler.sample_ids(e * num_samples, num_samples).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(num_samples)) for epoch in epochs)
    if num_samples == 50:
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    # a request across epochs is the epochs one after another
    assert sampler.sample_ids(0, 3 * num_samples).tolist() == [i for epoch in epochs for i in epoch]


def test_c111_a_step_has_the_same_samples_for_every_micro_batch_split() -> None:
    sampler = Sampler(np.arange(80 * 4 + 1), 4, seed=7)
    for first in (0, 8, 72, 76):  # 76 goes on into the next epoch
        whole = sampler.batches(first, 8, 8)
        for micro in (1, 2, 4):
            parts = sampler.batches(first, 8, micro)
            assert len(parts) == 8 // micro
            assert np.concatenate([b.tokens for b in parts]).tolist() == whole[0].tokens.tolist()
            assert np.concatenate([b.labels for b in parts]).tolist() == whole[0].labels.tolist()


def test_c106_a_restored_position_repeats_and_skips_nothing() -> None:
    def sampler() -> Sampler:
        return Sampler(np.arange(1000 * 2 + 1), 2, seed=3)

    whole = sampler().sample_ids(0, 20 * 8)
    first, rest = sampler().sample_ids(0, 7 * 8), sampler().sample_ids(7 * 8, 13 * 8)
    assert np.concatenate([first, rest]).tolist() == whole.tolist()
    assert len(set(whole.tolist())) == len(whole)


def test_c125_no_sample_disappears_at_the_end_of_an_epoch() -> None:
    """The rule: a step is always whole; it goes on with the first samples of the next epoch."""
    sampler = Sampler(np.arange(5 * 3 + 1), 3, seed=1)
    steps = [sampler.sample_ids(2 * step, 2).tolist() for step in range(5)]  # two epochs of five
    seen = [i for step in steps for i in step]
    assert sorted(seen[:5]) == sorted(seen[5:]) == [0, 1, 2, 3, 4]


def test_c104_sampling_leaves_global_generators_alone() -> None:
    states = [random.getstate(), np.random.get_state()[1].tolist()]
    sampler = Sampler(np.arange(401), 4, seed=3)
    sampler.batches(0, 8, 4)
    sampler.batches(96, 8, 2)
    assert [random.getstate(), np.random.get_state()[1].tolist()] == states


def test_c177_jumping_to_a_position_is_constant_time() -> None:
    stream = np.broadcast_to(np.uint16(7), (4 * 100_000_000 + 1,))  # takes no memory
    began = time.perf_counter()
    sampler = Sampler(stream, 4, seed=3)
    batch = sampler.batches(90_000_000, 8, 8)[0]
    assert time.perf_counter() - began < 2
    assert batch.tokens.shape == (8, 4)
    ids = sampler.sample_ids(90_000_000, 8)
    assert ids.tolist() == sampler.sample_ids(89_999_990, 20)[10:18].tolist()
    assert len(set(ids.tolist())) == 8 and ids.max() < 100_000_000


def test_c139_too_few_tokens_are_named_in_user_terms() -> None:
    Sampler(np.arange(33), 32)
    with pytest.raises(DataError, match=r"32 tokens.*seq_len=32 needs 33"):
        Sampler(np.arange(32), 32)


def test_a_ragged_batch_is_filled_with_rows_without_targets() -> None:
    sampler = Sampler(np.arange(100), 4, shuffle=False)
    batch = sampler.batch(np.array([2, 0]), rows=5)
    assert batch.tokens.shape == batch.labels.shape == (5, 4)
    assert batch.tokens[:2].tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert (batch.labels[2:] == IGNORE).all() and batch.weights.sum() == 8
