"""Members of the objects that a shape allows, and grammars of objects in any notation."""

import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from quire.core.checks import shown
from quire.grammar_writing.schema_shapes import Shape
from quire.grammar_writing.schemas import SchemaPart, escaped_name, refuse
from quire.grammar_writing.texts import literal_text
from quire.server.tools.grammar_rules import GrammarRules, alternatives, escaped, searched

MAX_OTHERS = 128  # properties that a schema does not name, of one object
_EMPTY = '""'
_WORDS = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


@dataclass(frozen=True)
class ObjectMembers:
    """Properties of an object, and the bounds on their number.

    `named`: keys, schemas that a value fits, all of them, and True if required. `others`: schemas of the properties
    with other names, None if there are none; their names fit `name_patterns`.
    """

    named: Sequence[tuple[str, list[SchemaPart], bool]]
    others: list[SchemaPart] | None
    name_patterns: Sequence[str]
    least: int
    most: int | None
    place: str


def members_of(shape: Shape) -> ObjectMembers:
    """Return the members of a shape of objects.

    If its schemas name properties, and none has `additionalProperties`, there are no others.
    """
    names: dict[str, None] = {}
    required: dict[str, None] = {}
    patterns: list[str] = []
    for schema, place in shape.parts:
        for keyword, kind in (("properties", dict), ("patternProperties", dict), ("required", list)):
            if not isinstance(schema.get(keyword, kind()), kind):
                refuse(place, f"{keyword} must be {'a list' if kind is list else 'an object'}")
        names |= dict.fromkeys(schema.get("properties", ()))
        required |= dict.fromkeys(key for key in schema.get("required", ()) if isinstance(key, str))
        patterns += schema.get("patternProperties", ())
    names |= dict.fromkeys(sorted(required.keys() - names.keys()))
    for schema, place in shape.parts:
        if schema.get("patternProperties") and (
            names or len(patterns) > 1 or schema.get("additionalProperties", False) is not False
        ):
            refuse(place, "unsupported keyword: patternProperties beside other properties")
    least, most = shape.limits("minProperties", "maxProperties")
    is_closed = bool(names or patterns) and not any(True for _ in shape.given("additionalProperties"))
    others = None if is_closed and not patterns else _others(shape)
    named = [(key, _of_name(shape, key), key in required) for key in names]
    return ObjectMembers(named, others, patterns, least, most, shape.place)


def _of_name(shape: Shape, key: str) -> list[SchemaPart]:
    """Return the schemas of the property of a name."""
    found = []
    for schema, place in shape.parts:
        if key in schema.get("properties", ()):
            found.append(SchemaPart(schema["properties"][key], f"{place}/properties/{escaped_name(key)}"))
        elif "additionalProperties" in schema:
            found.append(SchemaPart(schema["additionalProperties"], f"{place}/additionalProperties"))
    return found


def _others(shape: Shape) -> list[SchemaPart] | None:
    """Return the schemas of properties that are not named."""
    found = []
    for schema, place in shape.parts:
        if schema.get("patternProperties"):
            [(pattern, below)] = schema["patternProperties"].items()
            found.append(SchemaPart(below, f"{place}/patternProperties/{escaped_name(pattern)}"))
        elif "additionalProperties" in schema:
            found.append(SchemaPart(schema["additionalProperties"], f"{place}/additionalProperties"))
    return None if any(part.schema is False for part in found) else found


@dataclass(frozen=True)
class ObjectNotation:
    """The way in which a notation writes the properties of an object.

    `pair`: expression of a property, given the expression of its name, the schemas of its value, and its name or None;
    None if no value can be written. `name`: expression of a name. `key_pattern`: regex of the names that can be
    written. `other_names`: regex of the names that are written where a schema gives a pattern of them; where it leaves
    them open, they are words.
    """

    pair: Callable[[str, list[SchemaPart], str | None], str | None]
    name: Callable[[str], str]
    separator: str
    key_pattern: str
    other_names: str

    def can_write(self, key: str) -> bool:
        """Return whether a name can be written."""
        return re.fullmatch(self.key_pattern, key) is not None and key == key.strip()


def object_text(
    rules: GrammarRules, members: ObjectMembers, notation: ObjectNotation, reserved: Set[str] = frozenset()
) -> str | None:
    """Return an expression for the properties of an object, in the order of its schema; None if no object fits.

    `reserved`: names that other properties must not have, beside those of `members`. ValueError for a property that is
    required and has a name that the notation cannot write.
    """
    pairs: list[tuple[str, bool]] = []
    for key, parts, is_required in members.named:
        is_written = notation.can_write(key)
        if is_required and not is_written:
            raise ValueError(f"requires the property {shown(key)}, which cannot be written in the format of its calls")
        pair = notation.pair(notation.name(key), parts, key) if is_written else None
        if pair is not None:
            pairs.append((rules.add(pair), is_required))
        elif is_required:
            return None
    other = None
    if members.others is not None:
        taken = sorted({key for key, _, _ in members.named} | reserved)
        other = notation.pair(_other_name(rules, members, notation, taken), members.others, None)
    return _joined(rules, pairs, None if other is None else rules.add(other), notation.separator, members)


def _other_name(rules: GrammarRules, members: ObjectMembers, notation: ObjectNotation, taken: Sequence[str]) -> str:
    """Return an expression for a name that is not taken."""
    bodies = [_WORDS]
    if members.name_patterns:
        bodies = [f"/{notation.other_names}/", *map(searched, members.name_patterns)]
    if taken:
        bodies.append(f"~/{'|'.join(map(escaped, taken))}/")
    return rules.add(" & ".join(bodies), is_terminal=True)


def _joined(
    rules: GrammarRules, pairs: Sequence[tuple[str, bool]], other: str | None, separator: str, members: ObjectMembers
) -> str | None:
    """Return an expression for pairs in their order, of which those that are not required (False) may be left out."""
    between = f"{literal_text(separator)} " if separator else ""
    required = [pair for pair, is_required in pairs if is_required]
    optional = [pair for pair, is_required in pairs if not is_required]
    missing = members.least - len(required)
    room = len(optional) + MAX_OTHERS if members.most is None else members.most - len(required)
    if room < 0 or (missing > len(optional) and other is None):
        return None
    if missing == len(optional) and missing > 0 and (other is None or room == missing):
        required, optional, missing, room = [pair for pair, _ in pairs], [], 0, room - missing
    if missing > 1:  # (names that a schema leaves open may be repeated, and then count once)
        refuse(members.place, f"minProperties {members.least} cannot be enforced in the format of its calls")
    if room < len(optional) and not (room == 0 and missing <= 0):
        refuse(members.place, f"maxProperties {members.most} cannot be enforced in the format of its calls")
    optional = optional if room else []
    num_others = 0 if other is None else max(room - len(optional), 0)
    rest, starts = _EMPTY, []
    if other is not None and num_others:
        rest = rules.add(f"({between}{other}){{0,{num_others}}}")
        starts = [f"{other} ({between}{other}){{0,{num_others - 1}}}" if num_others > 1 else other]
    for pair in reversed(optional):
        starts.insert(0, f"{pair} {rest}")
        rest = rules.add(f"({between}{pair})? {rest}")
    if not required:
        return alternatives([*starts] if missing > 0 else [_EMPTY, *starts])
    first = f" {between}".join(required)
    if missing <= 0:
        return f"{first} {rest}"
    return f"{first} {between}{alternatives(starts)}"
