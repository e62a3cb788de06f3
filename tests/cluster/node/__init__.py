"""The node of world `processes`: runs the pods that are bound to it as local processes.

Speaks to the API server as a kubelet does, with a kubelet's rights. Knows nothing about the programs in the pods, and
nothing of the control plane but its address and credentials.

Reading order: agent (which pods) → pod (one pod's life) → container (one container's life) → runtime and shim
(one process). Beside them: volumes and environment (what a process finds), probes, status (pure), server (logs).
"""
