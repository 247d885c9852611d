"""The REST API of the service as Python calls. Answers are the JSON of `docs/rest-api.md`, read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from tsemon import errors
from tsemon.wire import API, AlertState, RunState

Json = dict[str, Any]

ERRORS: dict[str, type[errors.TsemonError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.TsemonError) and kind is not errors.TsemonError
}


class Client:
    """One service. Raises what the service says as the class of that error, ServerUnreachable when it says nothing."""

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        parsed = urlsplit(url)
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            raise errors.InvalidArgument(f"the service's address looks like http://127.0.0.1:8731, got {url!r}")
        self._http = httpx.Client(base_url=url.rstrip("/") + API, timeout=timeout_s)

    def runs(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        state: RunState | None = None,
        order: str = "-updated",
    ) -> Iterator[Json]:
        """All runs that match, the latest first unless `order` ("updated", "name", with "-" for descending) says else."""
        return self._pages("/runs", "runs", project=project, run=run, state=state, order=order)

    def find_run(self, run: str, project: str = "default") -> Json:
        """The run of this name. Raises UnknownRun."""
        for found in self.runs(project=project, run=run):
            return found
        raise errors.UnknownRun(f"the service has no run {run!r} in project {project!r}")

    def run(self, run_id: str) -> Json:
        """One run with its blocks, config, attempts, recorded metrics and latest scalars. Raises UnknownRun."""
        return self._get(f"/runs/{run_id}")

    def series(
        self,
        run_id: str,
        metric: str,
        *,
        layer: int | None = None,
        head: int | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
        points: int = 1000,
        attempt: int | None = None,
    ) -> Json:
        """One metric over steps as min, mean and max per bucket. `layer=-1` is the last layer.

        Raises UnknownRun, UnknownMetric, UnknownLayer, InvalidRange.
        """
        if layer is not None and layer < 0:
            length = self.run(run_id)["metrics"]["layers"].get(metric)
            if length is None:
                raise errors.UnknownMetric(f"the run has recorded no layered metric {metric!r}")
            layer += length
        return self._get(
            f"/runs/{run_id}/series",
            metric=metric,
            layer=layer,
            head=head,
            from_step=from_step,
            to_step=to_step,
            points=points,
            attempt=attempt,
        )

    def compare(
        self,
        run_ids: Sequence[str],
        metric: str,
        *,
        layer: int | None = None,
        head: int | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
        points: int = 1000,
    ) -> Json:
        """One metric of up to 20 runs over the same buckets of steps. Raises as `series`."""
        return self._get(
            "/compare",
            run=list(run_ids),
            metric=metric,
            layer=layer,
            head=head,
            from_step=from_step,
            to_step=to_step,
            points=points,
        )

    def heatmap(
        self,
        run_id: str,
        metric: str,
        *,
        from_step: int | None = None,
        to_step: int | None = None,
        columns: int = 200,
        attempt: int | None = None,
    ) -> Json:
        """One metric over layers and steps. Raises UnknownRun, UnknownMetric, InvalidRange."""
        return self._get(
            f"/runs/{run_id}/heatmap",
            metric=metric,
            from_step=from_step,
            to_step=to_step,
            columns=columns,
            attempt=attempt,
        )

    def export(
        self,
        run_id: str,
        path: str | Path,
        *,
        metrics: Sequence[str] | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
        attempt: int | None = None,
    ) -> Path:
        """Write all raw samples to a file that ends in .parquet or .csv; nothing is there until all of it is.

        Raises UnknownRun, UnknownMetric, InvalidRange, MissingPackage where the service cannot make Parquet.
        """
        path = Path(path)
        if path.suffix not in (".parquet", ".csv"):
            raise errors.InvalidArgument(f"expected a file that ends in .parquet or .csv, got {path}")
        query = {"metric": metrics, "from_step": from_step, "to_step": to_step, "attempt": attempt}
        params = {name: value for name, value in query.items() if value is not None}
        partial = path.with_name(f"{path.name}.partial")
        try:
            with self._http.stream(
                "GET", f"/runs/{run_id}/export", params={"format": path.suffix[1:], **params}
            ) as response:
                if not response.is_success:
                    response.read()
                    self._answer(response)
                with partial.open("wb") as file:
                    for part in response.iter_bytes():
                        file.write(part)
            return partial.rename(path)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        finally:
            partial.unlink(missing_ok=True)

    def alerts(
        self,
        *,
        run_id: str | None = None,
        state: AlertState | None = None,
        rule: str | None = None,
        since: str | None = None,
    ) -> Iterator[Json]:
        """Alerts, the newest first. `since` is an ISO time."""
        return self._pages("/alerts", "alerts", run=run_id, state=state, rule=rule, since=since)

    def test_rules(self, run_id: str, rules: str | None = None) -> Json:
        """What rules would have said of a run: `alerts`, `num_frames`, and `problems`. `rules` is the text of a rule file.

        Without it, those that are in force. It may take minutes for a long run. Raises UnknownRun, InvalidRules.
        """
        body = {"run_id": run_id} | ({} if rules is None else {"rules": rules})
        try:
            response = self._http.post("/rules/test", json=body, timeout=None)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        return self._answer(response)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pages(self, path: str, key: str, **query: Any) -> Iterator[Json]:
        cursor: str | None = None
        while True:
            page = self._get(path, **query, cursor=cursor)
            yield from page[key]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def _get(self, path: str, **query: Any) -> Json:
        try:
            response = self._http.get(path, params={name: value for name, value in query.items() if value is not None})
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        return self._answer(response)

    def _unreachable(self, error: httpx.TransportError) -> errors.ServerUnreachable:
        return errors.ServerUnreachable(f"no answer from {self._http.base_url}: {error}; is `tsemon serve` running?")

    def _answer(self, response: httpx.Response) -> Json:
        """What the service says; raises it where it is an error."""
        try:
            answer: Json = response.json()
        except ValueError as error:
            raise errors.ServerUnreachable(
                f"{self._http.base_url} answered {response.status_code} with no JSON; is it a tsemon service?"
            ) from error
        if response.is_success:
            return answer
        raise ERRORS.get(answer.get("error", ""), errors.ServerRefused)(
            answer.get("detail", f"the service answered {response.status_code}")
        )
