"""Run:ai's model streamer on a CPU: safetensors files of a folder or of an S3 prefix into memory of this process.

Speaks lines of JSON as every driven process; needs its own environment (`hack/peers.py runai`) and nothing of ours.
"""

import importlib.metadata
import json
import sys
import time


def main() -> None:
    """Answer verbs until stdin ends."""
    try:
        from runai_model_streamer import SafetensorsStreamer
    except ImportError as e:
        print(json.dumps({"absent": str(e)}), flush=True)
        return
    print(json.dumps({"versions": {"runai": importlib.metadata.version("runai-model-streamer")}}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started_s = time.perf_counter()
        total = 0
        try:
            with SafetensorsStreamer() as streamer:
                streamer.stream_files(asked["files"])
                for _, tensor in streamer.get_tensors():
                    total += tensor.numel() * tensor.element_size()
        except Exception as e:  # noqa: BLE001  Whatever it was, it takes no part.
            print(json.dumps({"failed": repr(e)}), flush=True)
            continue
        print(json.dumps({"seconds": time.perf_counter() - started_s, "bytes": total}), flush=True)


if __name__ == "__main__":
    main()
