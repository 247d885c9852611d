import pytest
import torch

from tsemon.errors import MissingData, MissingDevice
from tsemon.lab.reproduce import EXPERIMENTS, available
from tsemon.lab.reproduce import value_residual_82m as experiment
from tsemon.lab.reproduce.value_rules import Sizes
from tsemon.models import Llama

TINY = Sizes(
    model={"vocab": 300, "context": 16, "depth": 2, "width": 16, "heads": 2, "ffn": 32},
    rules=("vanilla", "resformer", "svformer", "neutreno"),
    batch_size=4,
    steps=1,
    warmup=2,
    window=5,
    precision=torch.bfloat16,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"Text number {number}, a few words and no more of them. " * 40)
    monkeypatch.setenv("TSEMON_TEXT", str(tmp_path))
    return tmp_path


class TestTheExperiment:
    def test_has_the_papers_size(self):
        with torch.device("meta"):
            model = Llama.from_preset(f"vanilla-{experiment.SIZES.size}", **experiment.SIZES.model)
        assert sum(parameter.numel() for parameter in model.parameters()) == 81_901_056

    def test_takes_as_many_tokens_as_the_text_has_in_half_precision(self, folder):
        shown = experiment.run_82m(TINY, 1500, num_val=2)
        losses = shown.tables[0]
        assert [row[0] for row in losses.rows] == list(TINY.rules)
        num_tokens = int(shown.settings["data"].split(" bytes")[1].split(" tokens")[0].split()[-1].replace(",", ""))
        assert {row[1] for row in losses.rows} == {num_tokens // 64}
        assert all(0 < float(row[2]) < 7 for row in losses.rows)  # log 300 is 5.7
        assert shown.settings["dtype"] == "bfloat16"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_says_without_a_gpu_what_it_needs_and_is_not_among_all(self):
        with pytest.raises(MissingDevice, match=r"TSEMON_TEXT.*needs a CUDA GPU"):
            experiment.run(quick=True)
        assert set(EXPERIMENTS) - set(available()) == {"value-residual-82m"}


class TestTheText:
    def test_is_as_long_as_asked_in_the_files_order(self, folder):
        pieces = experiment.text_of(experiment.text_files(), 3000)
        assert [piece.text[:13] for piece in pieces] == ["Text number 0", "Text number 1"]

    def test_is_missed_where_files_are_too_short(self, folder):
        with pytest.raises(MissingData, match=r"expected 1,000,000 bytes of text, found [\d,]+ in 3 files"):
            experiment.text_of(experiment.text_files(), 1_000_000)

    def test_is_python_sources_where_none_is_named(self, monkeypatch):
        monkeypatch.delenv("TSEMON_TEXT", raising=False)
        files = experiment.text_files()
        assert {path.suffix for path in files} == {".py"}
        assert len(files) == len(set(files))

    def test_becomes_tokens_with_an_end_of_each_document(self, folder):
        pieces = experiment.text_of(experiment.text_files(), 5000)
        tokens = experiment.tokens_of(pieces, vocab=299)
        assert tokens.max() < 299
        assert (tokens == tokens[-1]).sum() == len(pieces)
