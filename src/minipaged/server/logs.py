"""Logs of a server: one JSON object per line."""

from __future__ import annotations

import json
import logging
import warnings
from datetime import datetime, timezone


class JsonFormatter(logging.Formatter):
    """{"time", "level", "logger", "message"}, and "exception" with a traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if record.name == "minipaged.server.access":  # its message is an object already
            line.update(json.loads(record.getMessage()))
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def use_json() -> None:
    """Let every handler of the root logger write JSON, and warnings go there, as the logger "py.warnings"."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
    warnings.showwarning = lambda message, *_: logging.getLogger("py.warnings").warning("%s", message)
