"""YAML with the line of everything in it."""

import math

import pytest

from tsemon.errors import InvalidDocument
from tsemon_server.yaml_lines import MAX_DEPTH, parse, written

TEXT = """\
# a comment
receivers:
  - name: pager
    url: http://x   # the line of the key

  - name: chat
    words: [one,
            two]
on: frame
"""


class TestParse:
    def test_gives_plain_data(self):
        data, _ = parse(TEXT, "file")
        first, second = {"name": "pager", "url": "http://x"}, {"name": "chat", "words": ["one", "two"]}
        assert data == {"receivers": [first, second], "on": "frame"}

    def test_gives_nothing_for_an_empty_document(self):
        data, line_of = parse("# only a comment\n", "file")
        assert data is None
        assert line_of(("rules", 0)) == 1

    @pytest.mark.parametrize(
        ("word", "value"),
        [("1e-7", 1e-7), ("0.5", 0.5), ("-3", -3), ("+1.", 1.0), (".5", 0.5), ("-.inf", -math.inf), ("1:30", "1:30"),
         ("true", True), ("false", False), ("yes", "yes"), ("no", "no"), ("off", "off"), ("null", None), ("~", None),
         ("", None), ("2026-01-01", "2026-01-01"), ("'1'", "1"), ('"true"', "true"), ("010", 10), ("0x10", "0x10"),
         ("1_000", "1_000")],
    )  # fmt: skip
    def test_reads_words_as_yaml_1_2_does(self, word, value):
        data, _ = parse(f"key: {word}", "file")
        assert (data["key"], type(data["key"])) == (value, type(value))

    def test_reads_nan(self):
        assert math.isnan(parse("x: .nan", "file")[0]["x"])

    def test_keeps_keys_as_they_are_written(self):
        assert parse("{on: 1, true: 2, 3: 4, null: 5}", "file")[0] == {"on": 1, "true": 2, "3": 4, "null": 5}


class TestTheLine:
    def test_is_that_of_the_key_or_the_item(self):
        _, line_of = parse(TEXT, "file")
        places = [("receivers",), ("receivers", 0), ("receivers", 0, "url"), ("receivers", 1), ("on",)]
        assert [line_of(place) for place in places] == [2, 3, 4, 6, 9]
        assert [line_of(("receivers", 1, "words", place)) for place in (0, 1)] == [7, 8]

    def test_of_what_is_not_there_is_that_of_where_it_should_be(self):
        _, line_of = parse(TEXT, "file")
        assert line_of(("receivers", 1, "url")) == 6
        assert line_of(("routes", 0)) == 1


class TestAnInvalidDocument:
    @pytest.mark.parametrize(
        ("text", "problem"),
        [("a: 1\nb: [1,\n", "file line 3: column 1: expected YAML"),
         ("a: 1\nb: 2\na: 3", "file line 3: 'a' stands there a second time, first in line 1"),
         ("a: &x 1\nb: *x", "file line 1: .* anchor or alias"),
         ("a: 1\nb: !!python/object:os.system x", "file line 2: expected a value without a tag, got 'tag:yaml.org"),
         ("a: 1\n---\nb: 2", "file line 2: expected one document"),
         ("a: 1\n? [x]\n: 2", "file line 2: expected a word"),
         ("a: \x00", "file: expected YAML"),
         ('a: "\\U00110000"', "file: expected YAML"),
         ("a: 1\n\tb: 2", "file line 2: column 1: this line is indented with a tab"),
         ("[" * 10_000, f"file line 1: expected at most {MAX_DEPTH}")],
    )  # fmt: skip
    def test_tells_its_origin_and_line(self, text, problem):
        with pytest.raises(InvalidDocument, match=problem):
            parse(text, "file")


class TestAMistakeThatPeopleMake:
    @pytest.mark.parametrize(
        ("text", "line", "column", "advice"),
        [
            ('rules:\n  - when: "scalar("val/loss") > 3"\n', 2, 20, "the double quotes end before the text does"),
            ("rules:\n  - when: 'scalar('val/loss') > 3'\n", 2, 20, "the single quotes end before the text does"),
            ('rules:\n  - when: "a" > 3\n', 2, 17, "put the line in single quotes, with double quotes inside"),
            ("rules:\n  - when: loss > 3 for: 3 samples\n", 2, 23, "a second colon in one line; give each key"),
            ("rules:  - name: a    when: loss > 3", 1, 9, "use --data-binary instead of -d"),
            ("rules:\n  - name: a\n   when: loss > 3\n", 3, 4, "indented in another way"),
            ("rules:\n  - name: a\n      when: loss > 3\n", 3, 11, "indented in another way"),
            ('rules:\n  - when: "any(x \\d > 3)"\n', 2, 19, "in double quotes, a backslash"),
            ('rules:\n  - when: "loss > 3\n', 2, 11, "this quote is never closed"),
            ("rules:\n  - when: @x\n", 2, 11, "a text cannot begin with '@'"),
            ("rules:\n  - name: a\n    when loss > 3\n    for: 3\n", 3, 5, "expected a key and a colon"),
        ],
    )
    def test_is_told_with_its_column_and_what_to_write(self, text, line, column, advice):
        with pytest.raises(InvalidDocument) as error:
            parse(text, "file")
        assert str(error.value).startswith(f"file line {line}: column {column}: ")
        assert advice in str(error.value)

    def test_is_a_comment_that_has_swallowed_the_text(self):
        with pytest.raises(InvalidDocument, match=r"the whole text is one comment; .* use --data-binary"):
            parse("# rules of mine rules: - name: a", "file")


class TestWritten:
    def test_is_how_people_write_a_path(self):
        assert written(("receivers", 2, "url")) == "receivers[2].url"
        assert written(("rules", 0, "when", "all", 1)) == "rules[0].when.all[1]"


class TestTextOfJson:
    def test_is_whole_where_a_character_is_written_as_two_halves(self):
        data, _ = parse('{"a": "\\ud83e\\udde8", "\\ud83e\\udde8": 1}', "file")
        assert data == {"a": "\U0001f9e8", "\U0001f9e8": 1}

    @pytest.mark.parametrize("text", ['{"a": "\\ud83e"}', '{"\\udde8": 1}', 'a: "x\\ud800y"'])
    def test_with_half_a_character_is_refused(self, text):
        with pytest.raises(InvalidDocument, match="file line 1: expected whole characters, got half of one"):
            parse(text, "file")
