"""`helm test`: the API is served and readable to the operator, and an operator renews its lease.

Standard library only; runs in the operator's image with the operator's rights.
"""

import datetime
import json
import os
import pathlib
import ssl
import sys
import time
import urllib.error
import urllib.request
from typing import Any

ACCOUNT = pathlib.Path(
    os.environ.get("KUBERNETES_SERVICEACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount")
)
LEASE_SECONDS = 60


def get(path: str) -> Any:
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    server = f"https://{f'[{host}]' if ':' in host else host}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    request = urllib.request.Request(server + path)
    request.add_header("Authorization", f"Bearer {(ACCOUNT / 'token').read_text()}")
    trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, context=trust, timeout=10) as answer:
        return json.load(answer)


def check() -> None:
    watched = os.environ["WATCHED_NAMESPACE"]
    scope = f"namespaces/{watched}/" if watched else ""
    models = get(f"/apis/pilotfish.dev/v1alpha1/{scope}speculativemodels?limit=1")
    namespace = os.environ["POD_NAMESPACE"]
    lease = get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/pilotfish-operator")
    renewed = datetime.datetime.fromisoformat(lease["spec"]["renewTime"].replace("Z", "+00:00"))
    age = (datetime.datetime.now(datetime.UTC) - renewed).total_seconds()
    if age > LEASE_SECONDS:
        raise RuntimeError(f"lease last renewed {age:.0f} s ago by {lease['spec'].get('holderIdentity')}")
    print(f"{models['kind']} served; lease renewed {age:.0f} s ago by {lease['spec']['holderIdentity']}")


for _ in range(30):
    try:
        check()
        sys.exit(0)
    except (urllib.error.URLError, RuntimeError, KeyError) as error:
        print(f"not yet: {error}", flush=True)
        time.sleep(1)
sys.exit("the operator does not act; see its logs")
