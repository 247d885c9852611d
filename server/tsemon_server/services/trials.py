"""Tests of rules: what they would have said of a stored run, or of frames that were sent."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tsemon.errors import Forbidden, InvalidArgument, UnknownRun
from tsemon.wire import MAX_BLOCKS
from tsemon_answers.rules import Tried, TriedAlert
from tsemon_answers.runs import Run
from tsemon_server.alerts import ActiveRules
from tsemon_server.bodies import WHOLE, Body, read_body
from tsemon_server.rules.documents import MAX_CHARACTERS, load
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.views import views_of
from tsemon_server.services.ingest.schemas import (
    BlockIndex,
    FrameBody,
    GivenStacks,
    stacks_of,
    to_frame,
    with_blocks_in_all,
)
from tsemon_server.services.replay.recording import Attempt, Recording
from tsemon_server.services.replay.replaying import replay
from tsemon_server.services.replay.stored import StoredRun
from tsemon_server.services.replay.tracing import Traced
from tsemon_server.store import Store

MAX_TRIED_FRAMES = 10_000
"""That come in a body."""
MAX_TRIED_STORED_FRAMES = 100_000
MAX_POINTS = 500
MAX_TRACED_RULES = 4


class RuleTest(Body):
    """What rules would have said of a run, or of frames."""

    model_config = ConfigDict(
        json_schema_extra={
            "not": {
                "anyOf": [
                    {"properties": {"run_id": {"type": "null"}, "frames": {"type": "null"}}},
                    {
                        "properties": {"run_id": {"type": "string"}, "frames": {"type": "array"}},
                        "required": ["run_id", "frames"],
                    },
                ]
            }
        }
    )

    run_id: Annotated[str, Field(max_length=64)] | None = None
    """A run whose frames are stored."""
    frames: Annotated[list[FrameBody], Field(max_length=MAX_TRIED_FRAMES)] | None = None
    """Or frames, in any order."""
    num_blocks: Annotated[int, Field(ge=0, le=MAX_BLOCKS), WHOLE] = 0
    """With `frames`: the model's depth, against which the shapes of arrays are held."""
    stacks: GivenStacks = None
    """With `frames`: the stacks that the blocks form, one after the other; absent, they are one stack."""
    frozen_blocks: Annotated[list[BlockIndex], Field(max_length=MAX_BLOCKS)] = []  # noqa: RUF012
    """With `frames`: indexes of the blocks that are not trained, on purpose."""
    project: Annotated[str, Field(max_length=128)] | None = None
    """With `frames`: the project whose rules are tried. A run has one."""
    rules: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None
    """A rule file, as YAML or JSON; without it, the rules that are in force."""
    points: Annotated[int, Field(ge=2, le=MAX_POINTS), WHOLE] | None = None
    """With few `rules`: also return what each saw, every comparison with at most this many points."""

    @field_validator("stacks")
    @classmethod
    def _have_all_blocks(cls, stacks: GivenStacks, info: ValidationInfo) -> GivenStacks:
        return with_blocks_in_all(stacks, info.data.get("num_blocks"))

    @field_validator("points")
    @classmethod
    def _are_of_given_rules(cls, points: int | None, info: ValidationInfo) -> int | None:
        if points is not None and info.data.get("rules") is None:
            raise PydanticCustomError("points_without_rules", "points should come with rules")
        return points

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.run_id is None) == (self.frames is None):
            raise PydanticCustomError("one_of_both", "Either run_id or frames should be given")
        return self


def test(store: Store, active: ActiveRules, raw: bytes | bytearray, only: str | None) -> Tried:
    """Evaluate rules on a run or on frames, of the project `only` or of any. Raises UnknownRun and Forbidden."""
    body = read_body(RuleTest, raw)
    given = None if body.rules is None else Evaluator(load(body.rules, "rules"))
    with store.read() as reader:
        if body.run_id is not None:
            run = reader.runs.get(body.run_id)
            if only not in (None, run.project):
                raise UnknownRun(f"no run has the id {body.run_id!r}; see the list of runs for the existing ones")
            _check_length(run)
            evaluator = given or active.of(reader.rules, run.project).evaluator
            return _tried(StoredRun(reader, body.run_id), evaluator, body.points)
        project = only if body.project is None else body.project
        if only not in (None, project):
            raise Forbidden(f"the token may try the rules of project {only!r} alone, got project {project!r:.80}")
        evaluator = given or active.of(reader.rules, project).evaluator
    return _tried(_Sent(body), evaluator, body.points)


class _Sent:
    """Frames of a request, as a recording."""

    name = "frames"

    def __init__(self, body: RuleTest) -> None:
        self.problems: list[str] = []
        self._stacks = stacks_of(body.num_blocks, body.stacks)
        self._frames = [to_frame(sent, self._stacks) for sent in body.frames or ()]
        self._frozen = frozenset(body.frozen_blocks)

    def attempts(self, own: Collection[str] = ()) -> Iterator[Attempt]:
        yield Attempt(0, views_of(self._frames, self._frozen, self._stacks))


def _check_length(run: Run) -> None:
    if run.num_frames > MAX_TRIED_STORED_FRAMES:
        raise InvalidArgument(
            f"expected a run of at most {MAX_TRIED_STORED_FRAMES} frames, got one of {run.num_frames}, for which others "
            "would have to wait too long; `tsemon replay --database` tries rules on runs of any length"
        )


def _tried(recording: Recording, evaluator: Evaluator, points: int | None) -> Tried:
    if points is not None and len(evaluator.rules) > MAX_TRACED_RULES:
        raise InvalidArgument(f"expected at most {MAX_TRACED_RULES} rules with points, got {len(evaluator.rules)}")
    traced = Traced(recording, evaluator.rules if points is not None else (), points or 0)
    replayed = replay(traced, evaluator)
    return Tried(
        alerts=[TriedAlert.model_validate(alert, from_attributes=True) for alert in replayed.alerts],
        incidents=list(replayed.incidents),
        num_frames=replayed.num_frames,
        problems=list(replayed.problems),
        not_judged=list(replayed.not_judged),
        waiting=list(replayed.waiting),
        traces=traced.traces(),
    )
