"""The neutral checkpoint: one directory that any backend resumes from, bit-equal in all state.

    step-00000040/
        manifest.json                   what the tensors are, where each lies, and the progress of the run
        master-00001.safetensors        tensors of one group under canonical names, cut by size
        exp_avg-00001.safetensors
        exp_avg_sq-00001.safetensors

On several ranks each writes files of its own, master-rank00003-00001.safetensors, with the rectangles that it owns; the
manifest says where each rectangle of a tensor lies. Whoever reads takes the bytes that it needs.

What counts as state, and where it is kept:

| state | where | note |
|---|---|---|
| trained weights | group `master` | fp32, or float64 in a float64 run; compute weights are `master` rounded |
| AdamW moments | groups `exp_avg`, `exp_avg_sq` | names, shapes and dtype of `master` |
| weights without an optimizer | group `params` | their own dtypes; it stands alone or is not there |
| model description | manifest `spec` | complete: no other file says what the model is |
| progress | `training.step`, `optimizer_step_count`, `num_skipped` | a skipped step is a step, not an update |
| data position | `training.consumed_samples`, `data_fingerprint` | a place, and in which token stream |
| random streams | `training.model_seed`, `data_seed` | counter-based: the counters are step and samples |
| optimizer constants | `training.optimizer` | AdamW's numbers |
| effective configuration | manifest `config` | every value, to compare with at resume |

Derived and therefore nowhere stored: compute weights of a trained model, packed or stacked storage, the learning
rate (a function of step and settings), the order of samples, compiled code, timings.

No layout is state: the plan that wrote is named for people, and any other may read.

A directory with this layout is published by one rename when it is complete (`core.publish`); a process that dies
while saving leaves only a temporary name that `find_latest` passes over and reports.
"""

from duomesh.core.checkpoint.find import Found, checkpoint_path, find_fault, find_latest, keep_last
from duomesh.core.checkpoint.manifest import TrainingState
from duomesh.core.checkpoint.read import Checkpoint
from duomesh.core.checkpoint.write import write_checkpoint

__all__ = [
    "Checkpoint",
    "Found",
    "TrainingState",
    "checkpoint_path",
    "find_fault",
    "find_latest",
    "keep_last",
    "write_checkpoint",
]
