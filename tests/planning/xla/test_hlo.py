"""XLA's notations for groups of devices."""

import numpy as np
import pytest

from llamajax.planning.xla.parse import parse

GROUPS = {
    "{{0,1,2,3},{4,5,6,7}}": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "{}": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "[2,4]<=[8]": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "[4,2]<=[2,4]T(1,0)": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "mesh['a'=2,'b'=4] {'b'}": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "mesh['a'=2,'b'=4] {'a'}": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "mesh['a'=2,'b'=4] {'a','b'}": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "mesh['one'=1,'a'=2,'b'=4] {'one','a'}": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "mesh['a'=8] {'a':(1)2}": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "mesh['a'=8] {'a':(2)2}": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "mesh['a'=8] {'a':(4)2}": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "mesh['a'=8] {'a':(2)4}": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "mesh['a'=2,'b'=4], device_ids=([8]<=[4,2]T(1,0)) {'b'}": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}": [[3, 2], [1, 0]],
}


@pytest.mark.parametrize("text", GROUPS)
def test_replica_groups(text):
    """Explicit lists, iota form (XLA's `IotaReplicaGroupList`) and axes of a mesh (`MeshAxesReplicaGroupList`)."""
    line = f"  ROOT %r = f32[8]{{0}} all-reduce(%r), channel_id=1, replica_groups={text}, use_global_device_ids=true"
    module = parse(f"HloModule m\n\nENTRY %e () -> f32[8] {{\n{line}\n}}\n")
    groups = module.entry.root.replica_groups(8)
    assert np.sort(groups, axis=0).tolist() == np.sort(np.array(GROUPS[text]), axis=0).tolist()


def test_an_unknown_notation_of_groups_is_an_error():
    line = "  ROOT %r = f32[8]{0} all-reduce(%r), replica_groups=rings(3)"
    module = parse(f"HloModule m\n\nENTRY %e () -> f32[8] {{\n{line}\n}}\n")
    with pytest.raises(ValueError, match="unknown notation of replica groups"):
        module.entry.root.replica_groups(8)
