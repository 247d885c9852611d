import json

import pytest

from tsemon.errors import InvalidArgument, MissingData
from tsemon.lab.train import documents
from tsemon.lab.train.documents import find_files, read_pieces

ARTICLES = (
    " \n = Valkyria Chronicles III = \n \n Senjō no Valkyria 3 : <unk> Chronicles ( Japanese ) . \n"
    " \n = = Gameplay = = \n \n As with previous games , the player controls a squad . \n \n",
    " = 1 = \n \n One is a number . \n a = b \n",
)
"""As in `wiki.train.tokens`: blanks at the edges of lines, headings between blank lines."""


def texts(path):
    """The documents at a path."""
    found, document = [], ""
    for piece in read_pieces(find_files(path).train):
        document += piece.text
        if piece.ends_document:
            found.append(document)
            document = ""
    assert not document
    return found


def write_zst(path, text, num_frames):
    zstandard = pytest.importorskip("zstandard")
    compressor = zstandard.ZstdCompressor()
    raw = text.encode()
    size = -(-len(raw) // num_frames)
    path.write_bytes(b"".join(compressor.compress(raw[start : start + size]) for start in range(0, len(raw), size)))


def json_lines(*texts):
    """As SlimPajama has them."""
    meta = {"redpajama_set_name": "RedPajamaCommonCrawl"}
    return "".join(json.dumps({"text": text, "meta": meta}) + "\n" for text in texts)


class TestFilesOfText:
    @pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py"])
    def test_are_a_document_each(self, tmp_path, name):
        (tmp_path / name).write_text("héllo\nworld\n")
        assert texts(tmp_path / name) == ["héllo\nworld\n"]

    def test_are_read_in_the_order_of_their_paths_at_any_depth(self, tmp_path):
        for name in ("b.txt", "a/z.md", "a/y.py", ".git/c.txt", "a/image.png"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(name)
        assert texts(tmp_path) == ["a/y.py", "a/z.md", "b.txt"]

    def test_come_in_pieces_that_end_with_a_line(self, tmp_path, monkeypatch):
        monkeypatch.setattr(documents, "PIECE_CHARACTERS", 5)
        (tmp_path / "a.txt").write_text("one\ntwo\nthree\nfour")
        pieces = list(read_pieces(find_files(tmp_path).train))
        assert "".join(piece.text for piece in pieces) == "one\ntwo\nthree\nfour"
        assert all(piece.text.endswith("\n") for piece in pieces[:-1])
        assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert len(pieces) > 1

    def test_may_be_no_utf_8(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"caf\xe9\n")
        assert texts(tmp_path) == ["caf\N{REPLACEMENT CHARACTER}\n"]

    def test_keep_their_line_ends(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
        assert texts(tmp_path) == ["one\r\ntwo\n"]

    @pytest.mark.parametrize("name", ["nowhere", ".", "a.png"])
    def test_are_told_when_they_are_missing(self, tmp_path, name):
        (tmp_path / "a.png").touch()
        with pytest.raises(MissingData, match=r"\.txt, \.md, \.py"):
            find_files(tmp_path / name)


class TestWikiText:
    @pytest.fixture
    def folder(self, tmp_path):
        for part in ("train", "valid", "test"):
            (tmp_path / f"wiki.{part}.tokens").write_text("".join(ARTICLES))
        return tmp_path

    def test_has_an_article_for_a_document(self, folder):
        assert texts(folder) == list(ARTICLES)

    def test_brings_its_own_validation(self, folder):
        assert find_files(folder) == ((folder / "wiki.train.tokens",), (folder / "wiki.valid.tokens",))


class TestSlimPajama:
    @pytest.mark.parametrize("num_frames", [1, 3])
    def test_has_a_document_in_each_line(self, tmp_path, num_frames):
        write_zst(tmp_path / "example_train_0.jsonl.zst", json_lines("one\n", "zwei ü", "three"), num_frames)
        assert texts(tmp_path) == ["one\n", "zwei ü", "three"]

    def test_is_told_when_it_is_no_zst(self, tmp_path):
        pytest.importorskip("zstandard")
        (tmp_path / "a.jsonl.zst").write_bytes(b"random bytes")
        with pytest.raises(InvalidArgument, match=r"a\.jsonl\.zst is damaged, or no zst file"):
            texts(tmp_path)

    @pytest.mark.parametrize("num_frames", [1, 3])
    def test_is_told_when_it_is_cut_off(self, tmp_path, num_frames):
        file = tmp_path / "a.jsonl.zst"
        write_zst(file, json_lines(*(f"text {number}" for number in range(99))), num_frames)
        file.write_bytes(file.read_bytes()[:-5])
        with pytest.raises(InvalidArgument, match=r"a\.jsonl\.zst is cut off"):
            texts(tmp_path)

    def test_may_lie_across_the_parts_that_are_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr(documents, "COMPRESSED_BYTES", 7)
        expected = [f"text {number}" for number in range(99)]
        write_zst(tmp_path / "a.jsonl.zst", json_lines(*expected), 3)
        assert texts(tmp_path) == expected

    def test_may_be_unpacked(self, tmp_path):
        (tmp_path / "a.jsonl").write_text(json_lines("one", "two") + "\n")
        assert texts(tmp_path) == ["one", "two"]

    def test_has_folders_to_train_and_to_validate_with(self, tmp_path):
        for part in ("train", "validation", "test"):
            (tmp_path / part / "chunk1").mkdir(parents=True)
            (tmp_path / part / "chunk1" / "a.jsonl").write_text(json_lines(part))
        split = find_files(tmp_path)
        assert [[path.parent.parent.name for path in part] for part in split] == [["train"], ["validation"]]

    @pytest.mark.parametrize("line", ["no json", '{"meta": {}}', "[1]", '{"text": 7}'])
    def test_is_told_where_a_line_is_none(self, tmp_path, line):
        (tmp_path / "a.jsonl").write_text(json_lines("one") + line + "\n")
        with pytest.raises(InvalidArgument, match=r"a\.jsonl, line 2"):
            texts(tmp_path)
