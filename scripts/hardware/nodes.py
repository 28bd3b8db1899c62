"""The nodes of a Ray cluster beside each other (RAY_ADDRESS)."""

import os

from checks import Figures, Machine, Skip, Wrong, check


@check()
def nodes(machine: Machine) -> Figures:
    """All nodes of the cluster at RAY_ADDRESS belong together and reach each other."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise Skip("no cluster: RAY_ADDRESS is not set")
    from mrl.tools.node_checks import check_nodes

    count, faults = check_nodes(address, machine.device)
    if faults:
        raise Wrong("; ".join(faults))
    return {"nodes": count}
