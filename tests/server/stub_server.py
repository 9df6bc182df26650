"""A server process over the scripted runner, for tests that send signals: `stub_server.py FOLDER SECONDS_PER_STEP TIMEOUT`.

Prints its port, and each signal-free end; the runner writes for ever.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from minipaged.engine.async_llm import AsyncLLM  # noqa: E402
from minipaged.engine.config import EngineConfig  # noqa: E402
from minipaged.engine.engine import Engine  # noqa: E402
from minipaged.kv import KVBlockManager  # noqa: E402
from minipaged.model.tokenizer import Tokenizer  # noqa: E402
from minipaged.server import ServerSettings, create_app  # noqa: E402
from minipaged.server.lifecycle import listen, run  # noqa: E402
from server_rig import ScriptedRunner  # noqa: E402

if __name__ == "__main__":
    runner = ScriptedRunner()
    seconds = float(sys.argv[2])
    runner.gate.wait = lambda timeout: time.sleep(seconds) or True  # type: ignore[method-assign]
    engine = Engine(
        runner,
        KVBlockManager(4096, 4),
        EngineConfig(vocab_size=320, max_num_batched_tokens=16),
        tokenizer=Tokenizer(sys.argv[1]),
    )
    app = create_app(AsyncLLM.from_engine(engine), ServerSettings(shutdown_timeout=float(sys.argv[3])))
    sock = listen("127.0.0.1", 0)
    print(sock.getsockname()[1], flush=True)
    run(app, sock)
    print(f"ended with {engine.stats().blocks_in_use} blocks in use", flush=True)
