"""What a body asks of its text: one JSON schema, regular expression, list of choices or grammar, under many names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from minipaged.server.errors import refused

if TYPE_CHECKING:
    from minipaged.server.protocol import GenerationBody

Kind = Literal["json", "regex", "choice", "grammar"]

JSON_OBJECT = {"type": "object"}
OF_THE_ANSWER = "response_format"
"""The field that speaks of the answer alone, so that a call of a tool may stand in its place; the others speak of the
whole text."""


@dataclass(frozen=True)
class Constraint:
    """field: the name under which it came. value: by kind, a schema (also as JSON text), an expression, a list of
    strings, a grammar in Lark or GBNF."""

    field: str
    kind: Kind
    value: Any


def constraint_of(body: GenerationBody) -> Constraint | None:
    """The constraint that a body holds, None if there is none. 400 for two of them, and for an object without any."""
    schema = body.response_format.schema_of_text() if body.response_format is not None else None
    given: list[tuple[str, Kind, Any]] = [
        (OF_THE_ANSWER, "json", schema),
        ("guided_json", "json", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
        ("json_schema", "json", body.json_schema),
        ("regex", "regex", body.regex),
        ("grammar", "grammar", body.grammar),
        ("ebnf", "grammar", body.ebnf),
        *_structured(body),
    ]
    wanted = [Constraint(field, kind, value) for field, kind, value in given if value is not None]
    if len(wanted) > 1:
        names = " and ".join(constraint.field for constraint in wanted)
        raise refused(f"{names} exclude each other: give one", wanted[0].field)
    return wanted[0] if wanted else None


def _structured(body: GenerationBody) -> list[tuple[str, Kind, Any]]:
    given, field = body.structured_outputs, "structured_outputs"
    if given is None:
        return []
    found: list[tuple[str, Kind, Any]] = [
        (field, "json", given.json_),
        (field, "regex", given.regex),
        (field, "choice", given.choice),
        (field, "grammar", given.grammar),
        (field, "json", JSON_OBJECT if given.json_object else None),
    ]
    if all(value is None for _, _, value in found):
        raise refused(f"{field} must hold one of json, regex, choice, grammar, json_object", field)
    return found
