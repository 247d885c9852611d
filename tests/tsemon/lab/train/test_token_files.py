import shutil

import pytest
import torch

from tsemon.errors import InvalidArgument, MissingData
from tsemon.lab.train import token_files, tokenizers
from tsemon.lab.train.token_files import read_text, split_text

TEXTS = {"a.txt": "the cat sat on the mat\n" * 20, "b.txt": "é the dog sat on the log\n" * 20}


@pytest.fixture
def folder(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


class TestBytes:
    def test_are_the_text_with_a_zero_after_each_document(self, folder):
        text = read_text(folder, validation_ratio=0)
        assert bytes(text.train.tolist()) == b"".join(part.encode() + b"\0" for part in TEXTS.values())
        assert (text.vocab, text.train.dtype) == (256, torch.uint8)

    def test_are_one_per_byte_and_separators_for_free(self, folder):
        num_bytes = sum(len(text.encode()) for text in TEXTS.values())
        assert read_text(folder).bytes_per_token == num_bytes / (num_bytes + 2)


class TestBpe:
    @pytest.fixture(autouse=True)
    def library(self):
        return pytest.importorskip("tokenizers")

    def test_gives_the_text_back(self, folder, library):
        text = read_text(folder, tokenizer="bpe", vocab=300, validation_ratio=0)
        (file,) = folder.glob(".tsemon-tokens/*/tokenizer.json")
        decoded = library.Tokenizer.from_file(str(file)).decode(text.train.tolist(), skip_special_tokens=False)
        assert decoded == "".join(part + "<|endoftext|>" for part in TEXTS.values())
        assert (text.vocab, text.train.dtype) == (max(text.train.tolist()) + 1, torch.uint16)
        assert text.vocab <= 300

    def test_needs_fewer_tokens_than_bytes(self, folder):
        assert read_text(folder, tokenizer="bpe", vocab=300).bytes_per_token > 2

    def test_may_be_loaded(self, folder, tmp_path_factory):
        read_text(folder, tokenizer="bpe", vocab=300)
        (file,) = folder.glob(".tsemon-tokens/*/tokenizer.json")
        copy = shutil.copy(file, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
        loaded = read_text(folder, tokenizer=str(copy))
        assert torch.equal(loaded.train, read_text(folder, tokenizer="bpe", vocab=300).train)

    def test_takes_four_bytes_for_a_token_where_two_are_too_few(self, folder, tmp_path_factory, library):
        words = {f"w{number}": number for number in range(70_000)} | {"<|endoftext|>": 70_000}
        tokenizer = library.Tokenizer(library.models.WordLevel(words, unk_token="w69999"))
        file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        tokenizer.save(str(file))
        text = read_text(folder, tokenizer=str(file), validation_ratio=0)
        assert (text.train.dtype, text.train.tolist()) == (torch.uint32, [69_999, 70_000] * 2)

    def test_has_to_end_documents_somehow(self, folder, tmp_path_factory, library):
        tokenizer = library.Tokenizer(library.models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
        file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        tokenizer.save(str(file))
        with pytest.raises(InvalidArgument, match=r"has no token <\|endoftext\|> or .*separator="):
            read_text(folder, tokenizer=str(file))
        assert (
            read_text(folder, tokenizer=str(file), separator="<end>", validation_ratio=0).train.tolist() == [0, 1] * 2
        )

    def test_says_that_a_file_is_none(self, folder):
        with pytest.raises(MissingData, match="'bytes', 'bpe', 'words' or the path"):
            read_text(folder, tokenizer="gpt2")
        with pytest.raises(InvalidArgument, match=r"a\.txt is no tokenizer\.json"):
            read_text(folder, tokenizer=str(folder / "a.txt"))

    def test_has_room_for_all_bytes(self, folder):
        with pytest.raises(InvalidArgument, match="at least 257 tokens, got vocab 256"):
            read_text(folder, tokenizer="bpe", vocab=256)

    def test_learns_from_the_beginning_of_a_large_text(self, monkeypatch):
        monkeypatch.setattr(tokenizers, "TRAINING_CHARACTERS", 10)
        drawn = []
        tokenizers.train_bpe((drawn.append(text) or text for text in ["seven c", "seven c", "more"]), 257)
        assert drawn == ["seven c", "seven c"]


class TestWords:
    def test_end_lines_as_transformer_xl_does(self, folder):
        library = pytest.importorskip("tokenizers")
        text = read_text(folder, tokenizer="words", vocab=10, validation_ratio=0)
        (file,) = folder.glob(".tsemon-tokens/*/tokenizer.json")
        tokenizer = library.Tokenizer.from_file(str(file))
        line = [tokenizer.id_to_token(token) for token in text.train[:7].tolist()]
        assert text.vocab == 10
        assert line == ["the", "cat", "sat", "on", "the", "mat", "<eos>"]
        assert len(text.train) == 20 * 7 + 20 * 8  # no separators

    def test_leave_out_the_rarest(self, folder):
        pytest.importorskip("tokenizers")
        text = read_text(folder, tokenizer="words", vocab=3, validation_ratio=0)
        assert sorted(set(text.train.tolist())) == [0, 1, 2]
        assert int((text.train == 2).sum()) == 20 * 4  # "the"

    def test_have_no_bytes_for_they_lose_some(self, folder):
        pytest.importorskip("tokenizers")
        assert read_text(folder, tokenizer="words", vocab=10).bytes_per_token is None


class TestTokenFiles:
    @pytest.mark.parametrize("name", ["train.bin", "validation.bin", "about.json"])
    @pytest.mark.parametrize("junk", [b"", b"junk", b"[]", b"{}", None])
    def test_are_made_anew_when_they_are_damaged(self, folder, name, junk):
        train = read_text(folder, validation_ratio=0).train.clone()  # no longer of the file, which is cut off below
        (file,) = folder.glob(f".tsemon-tokens/*/{name}")
        file.unlink() if junk is None else file.write_bytes(junk)
        assert torch.equal(read_text(folder, validation_ratio=0).train, train)

    def test_are_made_once(self, folder, monkeypatch):
        first = read_text(folder)
        monkeypatch.setattr(token_files, "_encode", None)
        assert torch.equal(read_text(folder).train, first.train)

    def test_are_made_anew_when_the_text_changes(self, folder):
        read_text(folder)
        (folder / "a.txt").write_text("new")
        assert bytes(read_text(folder).train[:4].tolist()) == b"new\0"

    def test_lie_beside_the_text_or_where_one_says(self, folder, tmp_path_factory):
        cache = tmp_path_factory.mktemp("cache")
        read_text(folder / "a.txt", cache=cache)
        assert not (folder / ".tsemon-tokens").exists()
        assert [len(list(path.iterdir())) for path in cache.iterdir()] == [3]

    def test_leave_nothing_half_made(self, folder, monkeypatch):
        def full_disk(*_):
            raise OSError("no space left")

        monkeypatch.setattr(token_files, "_encode", full_disk)
        with pytest.raises(OSError, match="no space left"):
            read_text(folder)
        assert list((folder / ".tsemon-tokens").iterdir()) == []

    def test_are_mapped_into_memory(self, folder):
        with open("/proc/self/maps") as maps:
            before = maps.read()
        text = read_text(folder)
        with open("/proc/self/maps") as maps:
            after = maps.read()
        assert str(folder) in after
        assert str(folder) not in before
        assert len(text.train) > 0

    def test_say_when_there_is_no_place_for_them(self, folder):
        with pytest.raises(InvalidArgument, match="choose another folder: cache="):
            read_text(folder, cache=folder / "a.txt")


class TestTheSplitOfAText:
    def test_takes_the_end_to_validate_with(self):
        train, validation = split_text(torch.arange(40), 0.05)
        assert (len(train), validation.tolist()) == (38, [38, 39])

    def test_is_that_of_the_data_where_they_have_one(self, tmp_path):
        for part in ("train", "validation"):
            (tmp_path / part).mkdir()
            (tmp_path / part / "a.txt").write_text(part)
        text = read_text(tmp_path)
        assert [bytes(part.tolist()) for part in (text.train, text.validation)] == [b"train\0", b"validation\0"]

    def test_leaves_some_to_train_on(self):
        with pytest.raises(InvalidArgument, match=r"from 0 to less than 1, got 1\.0"):
            split_text(torch.arange(40), 1.0)
