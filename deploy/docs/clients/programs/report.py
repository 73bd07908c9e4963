"""What a client's program prints: a line of JSON for each thing it tried."""

import json
import sys
import traceback
from collections.abc import Callable


def attempt(name: str, work: Callable[[], object]) -> None:
    """`work` returns something true if it went well, or raises."""
    try:
        problem = None if work() else "the answer was empty"
    except Exception as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    print(json.dumps({"name": name, "problem": problem}), flush=True)


URL = sys.argv[1]
MODEL = sys.argv[2]
ASKED = [{"role": "user", "content": "Where does the captain live?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
