"""Drives OpenVINO GenAI's pipeline for bench.arms.openvino; runs in the peer's own environment.

    python openvino_worker.py FOLDER SETTINGS

One JSON object a line. In: {"id", "prompt", "output", "ignore_eos"} or {"cancel"}. Out: {"ready"},
then {"id", "tokens"} as they come, and {"id", "done"} or {"id", "error"} at last.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai


def say(**message: Any) -> None:
    """One line to whoever started this."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def read(messages: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """Passes on what comes in; None at its end."""
    for line in sys.stdin:
        messages.put(json.loads(line))
    messages.put(None)


def make_pipeline(folder: str, settings: dict[str, int]) -> genai.ContinuousBatchingPipeline:
    """The pipeline with the settings that its documentation advises for serving."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = settings["cache_gigabytes"]
    scheduler.max_num_seqs = settings["sequences"]
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties = {
        "INFERENCE_NUM_THREADS": settings["threads"],
        "PERFORMANCE_HINT": "LATENCY",
    }
    return genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)


class Worker:
    """Requests on their way, by id."""

    def __init__(self, pipeline: genai.ContinuousBatchingPipeline) -> None:
        self._pipeline = pipeline
        self._handles: dict[int, Any] = {}

    def take(self, message: dict[str, Any]) -> None:
        """Begins or cancels a request."""
        if "cancel" in message:
            handle = self._handles.pop(message["cancel"], None)
            if handle is not None:
                handle.cancel()
            return
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens = message["output"]
        wanted.ignore_eos = message["ignore_eos"]
        wanted.do_sample = False
        if not message["ignore_eos"]:
            wanted.eos_token_id = self._pipeline.get_tokenizer().get_eos_token_id()
        prompt = openvino.Tensor(np.array([message["prompt"]], dtype=np.int64))
        try:
            handle = self._pipeline.add_request(message["id"], prompt, wanted)
        except Exception as error:
            say(id=message["id"], error=str(error))
        else:
            self._handles[message["id"]] = handle

    def step(self) -> None:
        """Computes a step and says what came of it."""
        self._pipeline.step()
        for number, handle in list(self._handles.items()):
            while handle.can_read():
                for output in handle.read().values():
                    if output.generated_ids:
                        say(id=number, tokens=list(output.generated_ids))
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del self._handles[number]
                say(id=number, done=True)

    def run(self, messages: queue.SimpleQueue[dict[str, Any] | None]) -> None:
        """Until the end of what comes in."""
        while True:
            busy = self._pipeline.has_non_finished_requests()
            try:
                message = messages.get(block=not busy)
            except queue.Empty:
                self.step()
                continue
            if message is None:
                return
            self.take(message)


def main() -> None:
    """Starts the pipeline, says so, and works."""
    worker = Worker(make_pipeline(sys.argv[1], json.loads(sys.argv[2])))
    messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=read, args=(messages,), daemon=True).start()
    say(ready=True)
    worker.run(messages)


if __name__ == "__main__":
    main()
