"""What the OpenAPI document allows, the server reads: schemathesis draws it from the document alone."""

import json

import pytest
import schemathesis
from schemathesis import GenerationMode

from tsemon.errors import InvalidArgument
from tsemon_answers.record import Query
from tsemon_server.bodies import read_body
from tsemon_server.main import create_app
from tsemon_server.routes import ROUTES
from tsemon_server.routes.openapi import body_of
from tsemon_server.settings import Settings

OPERATIONS = [(method, route) for route in ROUTES for method in sorted(route.methods)]
WITH_BODY = [(method, route) for method, route in OPERATIONS if body_of(route) is not None]
WITH_QUERY = [(method, route) for method, route in OPERATIONS if route.dependant.query_params]
BEYOND_A_SCHEMA = (
    "Each should be the index of one of the",
    "Their blocks should add up to the",
    "points should come with rules",
    "Each stack should have a name of its own",
    "should have as many entries",
    "A body should have at most",
)
"""Our schemas do not say that frozen blocks must be among the blocks, that those of all stacks are all blocks, that no two
stacks have one name, that `points` come with rules, that columns of rows are equally long, or how many rows a body has."""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Cases of an operation that fit its schema."""
    app = create_app(Settings(database=f"sqlite:///{tmp_path_factory.mktemp('schema')}/t.db"), rules=())
    app.state.parts.store.close()
    schema = schemathesis.openapi.from_dict(app.openapi())
    return lambda method, route: schema[route.path][method].as_strategy(generation_mode=GenerationMode.POSITIVE)


def name_of(value):
    return value if isinstance(value, str) else value.path


class TestWhatTheSchemaAllows:
    @pytest.mark.parametrize(("method", "route"), WITH_BODY, ids=name_of)
    def test_is_read_as_a_body(self, drawn, search, method, route):
        def read(case):
            try:
                read_body(body_of(route), json.dumps(case.body, ensure_ascii=False).encode())
            except InvalidArgument as error:
                if not any(text in str(error) for text in BEYOND_A_SCHEMA):
                    raise

        search.run(read, drawn(method, route), 40)

    @pytest.mark.parametrize(("method", "route"), WITH_QUERY, ids=name_of)
    def test_is_read_as_a_query(self, drawn, search, method, route):
        (field,) = route.dependant.query_params
        model = field.field_info.annotation
        assert issubclass(model, Query)

        def read(case):
            model.model_validate({name: as_sent(value) for name, value in case.query.items()})

        search.run(read, drawn(method, route), 40)


def as_sent(value):
    """A parameter as FastAPI reads it from a query string."""
    if isinstance(value, list):
        return [as_sent(one) for one in value]
    return str(value).lower() if isinstance(value, bool) else str(value)
