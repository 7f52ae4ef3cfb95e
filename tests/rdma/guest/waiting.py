"""Run by the distribution's Python: how far a second thread gets while one thread waits for READs on a slow wire."""

import importlib
import json
import runpy
import sys
import threading
import time
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[3] / "guard/probe/rdma_verbs/__main__.py"))["load"]()
layout = importlib.import_module("kvguard_rdma_verbs.layout")
session = importlib.import_module("kvguard_rdma_verbs.session")

host, port, source, mode = sys.argv[1:]
link = session.Session(layout.load(), host=host, port=int(port), device="rxe0", gid_index=None, source=source,
                       event=mode == "event", seconds=20.0)  # fmt: skip
ticks, over = [0], threading.Event()


def tick() -> None:
    while not over.is_set():
        time.sleep(0.001)
        ticks[0] += 1


thread = threading.Thread(target=tick)
thread.start()
start, before = time.monotonic(), ticks[0]
rtts = [rtt for rtt in (link.read(1.0) for _ in range(20)) if rtt is not None]
seconds, after = time.monotonic() - start, ticks[0]
over.set()
thread.join()
link.close()
print(json.dumps({"seconds": seconds, "ticks": after - before, "rtt": min(rtts)}))
