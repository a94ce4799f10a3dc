"""What is learnt from the source of the data, so that new rows, texts and images become inputs in
the same way. A run saves it as encoding.json.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from fedclade.data.column_encoding import ColumnEncoding
from fedclade.data.image_encoding import ImageEncoding
from fedclade.data.text_encoding import TextEncoding

Encoding: TypeAlias = ColumnEncoding | TextEncoding | ImageEncoding

_ADAPTER: TypeAdapter[Encoding] = TypeAdapter(Annotated[Encoding, Field(discriminator="kind")])


def encoding_to_json(encoding: Encoding) -> dict[str, Any]:
    """The content of encoding.json."""
    return asdict(encoding)


def encoding_from_json(content: object) -> Encoding:
    """Check the content of encoding.json. What is wrong raises `ValueError`."""
    try:
        # Through JSON, whose lists may become tuples.
        encoding = _ADAPTER.validate_json(json.dumps(content))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ValueError(f"{where}: {problem['msg']}") from error
    encoding.check()
    return encoding
