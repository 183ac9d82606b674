#!/usr/bin/env bash
# torch 2.13.0, torch.fx. While symbolic_trace() traces a module in one thread, another thread's call of a module that has
# nothing to do with it raises NameError: it is no submodule of what is traced. A tracer replaces nn.Module.__call__ for the
# whole process until it is done. A model that serves in one thread fails while another thread traces its own.
. "$(dirname "$0")/environment.sh"
environment torch==2.13.0 numpy==2.2.6
"$python" - <<'PROGRAM' | tee "$folder/output"
import threading, torch
begun, done, seen = threading.Event(), threading.Event(), []
serving = torch.nn.Linear(2, 2)

class Traced(torch.nn.Module):
    def forward(self, x):
        begun.set()
        done.wait(60)
        return x + 1

def serve():
    begun.wait(60)
    try:
        serving(torch.ones(2))
        seen.append("answers")
    except Exception as error:
        seen.append(type(error).__name__)
    done.set()

thread = threading.Thread(target=serve)
thread.start()
torch.fx.symbolic_trace(Traced())
thread.join()
serving(torch.ones(2))
print(f"while another thread traces: {seen[0]}; afterwards: answers")
PROGRAM
expect <<'SEEN'
while another thread traces: NameError; afterwards: answers
SEEN
