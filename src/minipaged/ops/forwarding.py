"""A back end that passes every call on to another one: what observers, clocks and faults for tests are built on."""

from __future__ import annotations

from typing import Any

from minipaged.ops.backend import Backend


class ForwardingBackend(Backend):
    """`inner` behind the same face. A subclass overrides the calls that it looks at, or `call` for all of them."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        for attribute in Backend.__annotations__:
            setattr(self, attribute, getattr(inner, attribute))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # whatever a back end offers beyond the interface

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Method `name` of `inner`."""
        return getattr(self.inner, name)(*args, **options)

    def pack_linear(self, *args: Any, **options: Any) -> Any:
        return self.call("pack_linear", *args, **options)

    def linear(self, *args: Any, **options: Any) -> Any:
        return self.call("linear", *args, **options)

    def embed(self, *args: Any, **options: Any) -> Any:
        return self.call("embed", *args, **options)

    def rms_norm(self, *args: Any, **options: Any) -> Any:
        return self.call("rms_norm", *args, **options)

    def write_kv(self, *args: Any, **options: Any) -> Any:
        return self.call("write_kv", *args, **options)

    def pack_rotary(self, *args: Any, **options: Any) -> Any:
        return self.call("pack_rotary", *args, **options)

    def qk_norm_rope_write(self, *args: Any, **options: Any) -> Any:
        return self.call("qk_norm_rope_write", *args, **options)

    def plan(self, *args: Any, **options: Any) -> Any:
        return self.call("plan", *args, **options)

    def attention(self, *args: Any, **options: Any) -> Any:
        return self.call("attention", *args, **options)

    def copy_blocks(self, *args: Any, **options: Any) -> Any:
        return self.call("copy_blocks", *args, **options)
