"""An OpenAI-compatible HTTP server over `AsyncLLM`; it uses nothing of the engine but its public face.

middleware.py   who may come in, one log line per request
app.py          the routes          protocol.py   what a body may hold
completions.py  chat.py             from a body to requests, from outputs to JSON or events
guided.py                           what is asked of the text
service.py      admission, worker threads, the requests of one call
metrics.py  probes.py  lifecycle.py  what an operator needs
"""

from __future__ import annotations

from minipaged.server.app import create_app
from minipaged.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
