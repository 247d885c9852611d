"""The routes by which people read, edit and try rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Path, Request
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.concurrency import run_in_threadpool

from tsemon.errors import InvalidArgument
from tsemon.wire import MAX_BLOCKS
from tsemon_server.alerts.active import ActiveRules
from tsemon_server.alerts.rulebook import Rulebook, one_rule
from tsemon_server.alerts.standing import RuleStandings, standings
from tsemon_server.bodies import Body, read_body, read_raw, takes
from tsemon_server.ingest import FrameBody, to_frame
from tsemon_server.replay import Attempt, Recording, replay
from tsemon_server.replay.stored import StoredRun
from tsemon_server.rules import Evaluator, load
from tsemon_server.rules.views import views_of
from tsemon_server.store import Record, RuleVersion, Store

RuleName = Annotated[str, Path(description="The rule's name.", max_length=128)]
RunId = Annotated[str, Path(description="The run's id, as the registration answered it.", max_length=64)]
YAML: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/yaml": {"schema": {"type": "string", "description": "A rule file, as YAML or JSON."}}},
    }
}


class Rules(Record):
    """The rules that the service knows."""

    rules: list[RuleVersion]
    """The newest version of each, also of those that are disabled, by name."""


class RuleHistory(Record):
    """What a rule was from when on."""

    versions: list[RuleVersion]
    """All versions, the newest first: that one is in force."""


class RuleTest(Body):
    """What rules would have said of a run, or of frames."""

    run_id: Annotated[str, Field(max_length=64)] | None = None
    """A run whose frames are stored."""
    frames: list[FrameBody] | None = None
    """Or frames, in any order."""
    num_blocks: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = 0
    """With `frames`: the model's depth, against which the shapes of arrays are held."""
    frozen_blocks: list[Annotated[int, Field(ge=0)]] = []  # noqa: RUF012
    """With `frames`: indexes of the blocks that are not trained, on purpose."""
    rules: str | None = None
    """A rule file, as YAML or JSON; without it, the rules that are in force."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.run_id is None) == (self.frames is None):
            raise PydanticCustomError("one_of_both", "Either run_id or frames should be given")
        return self


class TriedAlert(Record):
    """An alert that the rules would have raised."""

    rule: str
    """The rule."""
    family: str
    """The kind of trouble that it looks for."""
    severity: Literal["info", "warning", "critical"]
    """How bad that is."""
    pending_step: int
    """The step at which its condition was first met."""
    firing_step: int
    """The step at which it had held for long enough."""
    resolved_step: int | None
    """The step at which it was over; null where it fires to the end."""
    summary: str
    """One sentence for people."""
    evidence: dict[str, Any]
    """What the rule saw when it fired."""
    advice: dict[str, str]
    """What to try (`text`), and where that comes from (`source`)."""


class Tried(Record):
    """What the rules would have said."""

    alerts: list[TriedAlert]
    """What would have fired, in that order."""
    num_frames: int
    """How many frames the rules have read."""
    problems: list[str]
    """What of the run they could not see."""


BODIES: tuple[type[Body], ...] = (RuleTest,)


def make_router(store: Store, rulebook: Rulebook, active: ActiveRules) -> APIRouter:
    """Routes that read and edit the rules that `rulebook` has in `store`, and try them."""
    router = APIRouter(tags=["rules"])

    def newest() -> Rules:
        with store.read() as reader:
            return Rules(rules=rulebook.newest(reader))

    def history(name: str) -> RuleHistory:
        with store.read() as reader:
            return RuleHistory(versions=rulebook.versions(reader, name))

    @router.get("/rules")
    def list_rules() -> Rules:
        """The rules that the service knows."""
        return newest()

    @router.put("/rules", openapi_extra=YAML)
    async def put_rules(request: Request) -> Rules:
        """Put the rules of a file in force; others stay as they are. All of them, or none where one is wrong."""
        raw = await read_raw(request)

        def put() -> Rules:
            rules = load(_text(raw), "body")
            with store.write() as writer:
                rulebook.edit(writer, rules)
            return newest()

        return await run_in_threadpool(put)

    @router.post("/rules/test", openapi_extra=takes(RuleTest))
    async def test_rules(request: Request) -> Tried:
        """What rules would have said of a stored run, or of frames. Nothing is kept of it."""
        raw = await read_raw(request)

        def test() -> Tried:
            body = read_body(RuleTest, raw)
            with store.read() as reader:
                given = None if body.rules is None else Evaluator(load(body.rules, "rules"))
                evaluator = active.of(reader).evaluator if given is None else given
                if body.run_id is not None:
                    return _tried(StoredRun(reader, body.run_id), evaluator)
            return _tried(_Sent(body), evaluator)

        return await run_in_threadpool(test)

    @router.get("/rules/{name}")
    def describe_rule(name: RuleName) -> RuleHistory:
        """All versions of one rule."""
        return history(name)

    @router.put("/rules/{name}", openapi_extra=YAML)
    async def put_rule(name: RuleName, request: Request) -> RuleHistory:
        """Put a rule in force: a new one, or in place of the one of its name. What it is to be already is left."""
        raw = await read_raw(request)

        def put() -> RuleHistory:
            rule = one_rule(_text(raw), name)
            with store.write() as writer:
                rulebook.edit(writer, [rule])
            return history(name)

        return await run_in_threadpool(put)

    @router.delete("/rules/{name}")
    def disable_rule(name: RuleName) -> RuleHistory:
        """Let a rule look at no run any more; what it has opened is over. Its versions stay."""
        with store.write() as writer:
            rulebook.disable(writer, name)
        return history(name)

    @router.post("/rules/{name}/restore")
    def restore_rule(name: RuleName) -> RuleHistory:
        """Put a built-in rule in force as it came."""
        with store.write() as writer:
            rulebook.restore(writer, name)
        return history(name)

    @router.get("/runs/{run_id}/rules")
    def describe_standings(run_id: RunId) -> RuleStandings:
        """How each rule that is in force stands on a run."""
        with store.read() as reader:
            return standings(reader, active.of(reader), run_id)

    return router


class _Sent:
    """Frames of a request, as a recording."""

    name = "frames"

    def __init__(self, body: RuleTest) -> None:
        self.problems: list[str] = []
        self._frames = [to_frame(sent, body.num_blocks) for sent in body.frames or ()]
        self._frozen = frozenset(body.frozen_blocks)

    def attempts(self) -> Iterator[Attempt]:
        yield Attempt(0, views_of(self._frames, self._frozen))


def _tried(recording: Recording, evaluator: Evaluator) -> Tried:
    replayed = replay(recording, evaluator)
    return Tried(
        alerts=[TriedAlert.model_validate(alert, from_attributes=True) for alert in replayed.alerts],
        num_frames=replayed.num_frames,
        problems=list(replayed.problems),
    )


def _text(raw: bytes | bytearray) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"body: expected a rule file in UTF-8, got something else ({error.reason})") from None
