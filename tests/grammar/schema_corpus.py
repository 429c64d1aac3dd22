"""207 schemas after public corpora, written anew for these tests, and an oracle for their values.

JSON-Schema-Test-Suite (each keyword alone), and JSONSchemaBench with its sources: GitHub and
SchemaStore (configuration), Kubernetes, Snowplow (events), Glaive and BFCL (calls of functions),
the Washington Post (documents). Strings and lists are short, so that random outputs end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema

from ferryman.schedule.output_grammar import OutputGrammar

ENTRIES = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))
SCHEMAS: tuple[Mapping[str, Any], ...] = tuple(entry["schema"] for entry in ENTRIES)
GRAMMARS = tuple(OutputGrammar.json_schema(schema) for schema in SCHEMAS)
# The library of grammars writes 29 February in every year, and a leap second in every minute, which
# the checks of formats do not take.
_LEAPS = re.compile(r"-02-29|:60")


def check_valid(schema: Mapping[str, Any], text: str) -> None:
    """Raises ValueError for a text that is no JSON, ValidationError for one that is not valid."""
    checker = None if _LEAPS.search(text) else jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
