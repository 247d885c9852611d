import math
import sys
from datetime import UTC, datetime

import pandas
import polars
import pyarrow
import pytest

from tests.clients.conftest import Writer
from tsemon.errors import MissingPackage
from tsemon.wire import Array, Frame
from tsemon_client import Client, Comparison, Heatmap, RecordedFrame, Records, RuleVersion, Run, Series, TagUse

SERIES = Series(
    metric="loss", layer=None, head=None, step=[0, 10], min=[1.0, None], mean=[2.0, None], max=[3.0, None],
    nonfinite=[0, 2], damaged=0,
)  # fmt: skip
HEATMAP = Heatmap(metric="m", step=[0, 10], layers=2, values=[[0.1, 0.2], [0.3, None]], damaged=0)
BUCKET = {"min": 1.0, "mean": 1.0, "max": 1.0, "nonfinite": 0}
RUN = {"project": "p", "min": [1.0], "mean": [1.0], "max": [1.0], "nonfinite": [0], "damaged": 0}
COMPARISON = Comparison(
    metric="loss",
    layer=None,
    head=None,
    runs=[RUN | {"run_id": "1", "run": "a", "step": [5]}, RUN | {"run_id": "2", "run": "b", "step": [6], "x": [0.5]}],
)
FRAME = RecordedFrame(
    attempt=1, step=5, time=1.0, scalars={"loss": 2.0}, layers={"m": [0.1, None]}, heads={"h": [[0.5, 0.6]]}
)
TABLES = {
    "series": (
        SERIES,
        [
            {"step": 0, "min": 1.0, "mean": 2.0, "max": 3.0, "nonfinite": 0},
            {"step": 10, "min": None, "mean": None, "max": None, "nonfinite": 2},
        ],
    ),
    "heatmap": (
        HEATMAP,
        [
            {"step": 0, "layer": 0, "value": 0.1},
            {"step": 0, "layer": 1, "value": 0.2},
            {"step": 10, "layer": 0, "value": 0.3},
            {"step": 10, "layer": 1, "value": None},
        ],
    ),
    "comparison": (
        COMPARISON,
        [
            {
                "run_id": id,
                "project": "p",
                "run": run,
                "x": x,
                "step": step,
                "min": 1.0,
                "mean": 1.0,
                "max": 1.0,
                "nonfinite": 0,
            }
            for id, run, x, step in (("1", "a", 5.0, 5), ("2", "b", 0.5, 6))
        ],
    ),
    "frame": (
        FRAME,
        [
            {"metric": "loss", "layer": None, "head": None, "value": 2.0},
            {"metric": "m", "layer": 0, "head": None, "value": 0.1},
            {"metric": "m", "layer": 1, "head": None, "value": None},
            {"metric": "h", "layer": 0, "head": 0, "value": 0.5},
            {"metric": "h", "layer": 0, "head": 1, "value": 0.6},
        ],
    ),
    "list": (Records(TagUse, [TagUse(tag="a", runs=2)]), [{"tag": "a", "runs": 2}]),
}


@pytest.mark.parametrize(("record", "rows"), TABLES.values(), ids=TABLES)
class TestATable:
    def test_of_arrow_and_of_polars_has_these_rows(self, record, rows):
        assert record.to_arrow().to_pylist() == rows
        assert record.to_polars().to_dicts() == rows

    def test_of_pandas_has_these_rows(self, record, rows):
        frame = record.to_pandas()
        assert list(frame.columns) == list(rows[0])
        assert frame.astype(object).where(frame.notna(), None).to_dict("records") == rows


class TestAListOfRecords:
    VERSION = RuleVersion(
        name="r", version=1, origin="edited", enabled=True, digest="d", definition={"when": "é"},
        created_at=datetime(2026, 1, 31, 12, tzinfo=UTC),
    )  # fmt: skip

    @pytest.mark.parametrize("versions", [[VERSION], []], ids=["one", "none"])
    def test_has_a_column_of_its_type_for_each_field(self, versions):
        records = Records(RuleVersion, versions)
        names = list(RuleVersion.model_fields)
        assert dict(zip(names, map(str, records.to_pandas().dtypes), strict=True)) == {
            "name": "object", "version": "int64", "project": "object", "origin": "object", "enabled": "bool",
            "digest": "object", "definition": "object", "created_at": "datetime64[us, UTC]",
        }  # fmt: skip
        assert records.to_polars().schema["created_at"] == polars.Datetime("us", "UTC")
        assert records.to_arrow().schema.types == [
            pyarrow.string(), pyarrow.int64(), pyarrow.string(), pyarrow.string(), pyarrow.bool_(), pyarrow.string(),
            pyarrow.string(), pyarrow.timestamp("us", "UTC"),
        ]  # fmt: skip
        assert records.to_polars()["definition"].to_list() == ['{"when": "é"}'] * len(versions)

    def test_has_whole_numbers_where_some_are_missing(self):
        records = Records(Run)
        assert str(records.to_pandas()["last_step"].dtype) == "int64"
        assert str(FRAME.to_pandas()["layer"].dtype) == "Int64"
        assert math.isnan(SERIES.to_pandas()["mean"][1])


@pytest.mark.parametrize(
    ("method", "package", "extra"),
    [("to_pandas", "pandas", "pandas"), ("to_polars", "polars", "polars"), ("to_arrow", "pyarrow", "export")],
)
def test_without_the_package_the_extra_is_named(method, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=rf"{method} needs {package}; pip install 'tsemon\[{extra}\]'"):
        getattr(SERIES, method)()


def test_what_the_service_answers_becomes_a_table(service):
    writer = Writer(service)
    run_id = writer.register("r", tags=["a", "b"])
    writer.send(run_id, *(Frame(i, i, 1.0, {"loss": float("nan")}, {"m": Array.of([i, 0.5])}) for i in range(3)))
    with Client(service.url) as client:
        assert client.series(run_id, "m", layer=-1).to_polars()["mean"].to_list() == [0.5] * 3
        wide = client.heatmap(run_id, "m").to_pandas().pivot(index="layer", columns="step", values="value")
        assert wide.to_numpy().tolist() == [[0, 1, 2], [0.5] * 3]
        runs = client.runs().all()
        assert runs.to_arrow()["tags"].to_pylist() == ['["a", "b"]']
        (row,) = runs.to_pandas().itertuples()
        assert (row.run_id, row.last_step, row.updated_at) == (run_id, 2, pandas.Timestamp(runs[0].updated_at))
        assert client.compare([run_id], "m", layer=0).to_arrow()["run_id"].to_pylist() == [run_id] * 3
