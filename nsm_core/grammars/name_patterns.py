"""`patternProperties` of a closed object that match no name but those that the object has anyway.

There llguidance allows a comma behind the last property, and then no name: the answer could not go on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nsm_core.grammars.subschemas import subschemas


def trials_of_patterns(schema: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """For each such object a schema of its names alone, and a text behind which another name must be possible."""
    for part in subschemas(schema):
        patterns, properties, required = (part.get(name) for name in ("patternProperties", "properties", "required"))
        if not isinstance(patterns, dict) or not patterns or part.get("additionalProperties") is not False:
            continue
        given = [
            *(properties if isinstance(properties, dict) else ()),
            *(required if isinstance(required, list) else ()),
        ]
        names = list(dict.fromkeys(name for name in given if isinstance(name, str)))
        if names:
            trial = {
                "type": "object",
                "properties": {name: {"const": 0} for name in names},
                "required": names,
                "patternProperties": {pattern: {"const": 0} for pattern in patterns},
                "additionalProperties": False,
            }
            yield trial, json.dumps(dict.fromkeys(names, 0), ensure_ascii=False)[:-1] + ", "
