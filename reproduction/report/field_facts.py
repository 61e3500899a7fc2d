"""Facts of the methods of the field, as their sources tell them, and what other authors printed of
them.
"""

from dataclasses import dataclass

BEHIND = {
    "featcal": "with FeatCal", "featcal_best": "with FeatCal extended", "surgery": "with Surgery",
    "prob_surgery": "with ProbSurgery", "svc": "with SVC",
}  # fmt: skip
TRAINED = {
    "prodistill": "with ProDistill",
    "surgery_v2": "with SurgeryV2",
    "interv_merge": "with IntervMerge",
}  # behind some
NOTHING, TRAIN, UNLABELLED = "nothing", "training samples", "unlabelled samples"
TANGENT = "tangent"
# what breaks a constraint that one may have: a mark for each, explained below the table
MARKS = {
    "G": "takes gradients: a training loop, and memory for it",
    "H": "needs the tasks’ heads, so that there is an answer to look at",
    "V": "its scale is chosen on labelled validation samples, as its source does",
    "A": "adapts to unlabelled samples, in its source to those that are scored",
    "T": "has to be told the task of every sample at test time",
    "P": "adds parameters of every task to the merged model",
    "F": "made from its published formula; its code could not be consulted",
    "L": "needs experts that were fine-tuned linearised, and runs linearised: twice the cost at test time, and no network of the "
    "base’s form that anything could be put behind",
    "B": "needs the base’s curvature on its own training samples; here it is taken on the tasks’ samples",
}


@dataclass(frozen=True)
class Known:
    """A method as its source describes it: its name, what it looks at, and the marks of MARKS that
    it bears.
    """

    name: str
    sees: str = NOTHING
    marks: str = ""


METHODS = {
    "average": Known("Simple Averaging"),
    "task_arithmetic": Known("Task Arithmetic", marks="V"),
    "ties": Known("TIES-Merging", marks="V"),
    "dare": Known("DARE, Task Arithmetic", marks="V"),
    "dare_ties": Known("DARE, TIES", marks="V"),
    "breadcrumbs": Known("Model Breadcrumbs", marks="V"),
    "consensus": Known("Consensus TA", marks="V"),
    "pcb": Known("PCB-Merging", marks="V"),
    "tsv_merge": Known("TSV-Merge", marks="V"),
    "iso_c": Known("Iso-C", marks="V"),
    "iso_cts": Known("Iso-CTS", marks="V"),
    "wudi": Known("WUDI-Merging", marks="G"),
    "wudi_closed_form": Known("WUDI-Merging, closed form"),
    "fisher": Known("Fisher Merging", TRAIN, "GH"),
    "gradient_matching": Known("Gradient Matching", TRAIN, "GHB"),
    "regmean": Known("RegMean", TRAIN),
    "regmean_plus_plus": Known("RegMean++", TRAIN),
    "mats": Known("MaTS", TRAIN),
    "lot": Known("LOT Merging", TRAIN, "F"),
    "adamerging": Known("AdaMerging", UNLABELLED, "GHA"),
    TANGENT: Known("Task Arithmetic, tangent space", marks="VL"),
    "featcal": Known("FeatCal", TRAIN),
    "featcal_best": Known("FeatCal extended", TRAIN),
    "surgery": Known("Surgery", UNLABELLED, "GTP"),
    "prob_surgery": Known("ProbSurgery", UNLABELLED, "GTP"),
    "svc": Known("SVC"),
    "prodistill": Known("ProDistill", TRAIN, "G"),
    "surgery_v2": Known("SurgeryV2", UNLABELLED, "GTP"),
    "interv_merge": Known("IntervMerge", UNLABELLED, "GTP"),
}
# The paper's references 1 to 18, each a merger or something behind one, by the rows that they have
# here.
REFERENCES = (
    ("average",), ("fisher",), ("task_arithmetic",), ("ties",), ("adamerging",), ("dare", "dare_ties"), ("breadcrumbs",),
    ("mats",), ("gradient_matching",), ("wudi", "wudi_closed_form"), ("surgery",), ("prob_surgery",), ("surgery_v2",),
    ("interv_merge",), (TANGENT,), ("regmean",), ("regmean_plus_plus",), ("lot",),
)  # fmt: skip
# Averages over the eight tasks as printed; the models are FusionBench's
# tanganke/clip-vit-base-patch32_<task>.
FUSION_BENCH = "FusionBench, docs/modelpool/clip_vit.md"
TSV_RESULTS = "FusionBench, examples/task_singular_vector/results/clip-vit-base-patch32/TA8.json"
PRINTED = {
    "Simple Averaging": (66.5, FUSION_BENCH),
    "Task Arithmetic, λ = 0.3": (68.0, FUSION_BENCH),
    "Fisher Merging": (70.6, FUSION_BENCH),
    "TIES-Merging, λ = 0.3": (72.2, FUSION_BENCH),
    "RegMean": (82.4, FUSION_BENCH),
    "AdaMerging, layer-wise": (82.6, FUSION_BENCH),
    "Iso-CTS, scale 1.5": (82.7, FUSION_BENCH),
    "Iso-C, scale 1.5": (82.8, FUSION_BENCH),
    "TSV-Merge": (83.1, TSV_RESULTS),
    "RegMean++": (84.4, FUSION_BENCH),
    "Concrete AdaMerging, layer-wise": (84.4, FUSION_BENCH),
    "WUDI-Merging": (84.5, FUSION_BENCH),
}
