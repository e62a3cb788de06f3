"""The engine: a request comes in at `server`, tokens leave it. Reading order is the data flow:
server → scheduler → worker → speculation.step → kernels → scheduler.commit → server."""
