"""docs/new-names.md has each public name since 0.1.0, and each test that it names uses the name."""

from __future__ import annotations

import importlib
import operator
import re
import types

import pytest
from scripts.write_api_pages import PACKAGES, ROOT, public_names

from forge_data import BuiltinCorpus, Loader, PackedStream, documents

pytestmark = pytest.mark.lane("test")

#: (package, name, the name it is for or the use that it opens, test) of each row.
ROWS = re.findall(
    r"^\| `(\w+)\.([\w.]+)` \| (.+) \| \[\w+\]\(\.\./(.+)\) \|$",
    (ROOT / "docs/new-names.md").read_text(),
    re.MULTILINE,
)
#: The names in `__all__` of each package of 0.1.0.
OLD = {
    "forge_core": (
        "Attention AttentionSpec FeedForward Init KVCache OptimizerConfig RMSNorm "
        "RopeScaling SamplingConfig ScheduleConfig TokenContext TokenLoss Transformer "
        "TransformerConfig build_optimizer build_schedule cross_entropy families "
        "flops_per_token fused_cross_entropy generate generate_stream initialise "
        "parameter_count"
    ),
    "forge_moe": (
        "AuxLosses Dispatched Experts LocalDispatch MoE MoEConfig Routed Router "
        "RouterConfig RoutingRule SortedExperts aux_losses expert_grad_norm "
        "expert_parallelize load_full_state recompute_contexts set_aux_scale upcycle "
        "update_expert_bias"
    ),
    "forge_parallel": (
        "Axis Meshes ParallelConfig StartError World accumulate apply_fsdp "
        "clip_grad_norm_ clip_grads_ end_process_group find_world follow_requires_grad "
        "global_count global_grad_norm launch leave make_meshes materialise parallelize "
        "reshard select_device start_process_group store_parameters"
    ),
    "forge_data": (
        "Batch BuiltinCorpus ByteTokenizer DataConfig InvalidData JsonTokenizer Loader "
        "PackedStream Permutation PhaseConfig Ragged Source SourceConfig Stream "
        "TokenFiles Tokenizer TrainingSourceConfig batch_of filler_batch load_tokenizer "
        "open_header open_source open_stream open_training verify"
    ),
    "forge_ckpt": (
        "CheckpointMismatch CorruptCheckpoint ForgeLoadPlanner ForgeReader "
        "ForgeSavePlanner ForgeWriter Keep RNGState SaveEvent SavedTensors StepExists "
        "Store StoreInUse WeightsReport load_hf load_step load_weights match_weights "
        "read_tensors"
    ),
    "forge_resilience": (
        "Agreement Decision ExitCode Journal NumericsPolicy PendingDecision StopSignal "
        "Vote nonfinite read_events run_local_workers"
    ),
    "forge_vlm": (
        "VLM AdapterConfig CrossAttentionConfig FusionConfig ModalityConfig Segment "
        "SequencePlan VLMConfig VisionConfig warm_start"
    ),
    "forge_train": (
        "Callback ConfigError DataError Extension JobConfig JobError Layers ResolvedJob "
        "Run RunDirectory RunResult Sink StateError Trainer column_of load_folder "
        "load_job load_model load_trained read_layers read_rows read_run resolve"
    ),
    "forge_lab": "evaluate_run extract_run read_study replay_step run_goodput write_page",
}


def test_the_table_has_each_name_since_0_1_0() -> None:
    added = {f"{p}.{n}" for p in PACKAGES for n in {*(public_names(p) or ())} - {*OLD[p].split()}}
    listed = [f"{package}.{name}" for package, name, *_ in ROWS]
    assert len(listed) == len({*listed})
    assert {name for name in listed if name.count(".") == 1} == added


@pytest.mark.parametrize(("package", "name", "use", "test"), ROWS)
def test_its_test_uses_it(package: str, name: str, use: str, test: str) -> None:
    found = operator.attrgetter(name)(importlib.import_module(package))
    text = (ROOT / test).read_text()
    top, _, member = name.partition(".")
    imports = rf"from {package} import (\([^)]*|[^(\n]*)\b{top}\b|\b{package}\.{top}\b"
    assert re.search(imports, text)
    times = len(re.findall(rf"\b{top}\b", text))
    assert times > 1 or f"{package}.{top}(" in text or isinstance(found, types.ModuleType)
    assert f".{member}(" in text or not member


def test_documents_of_a_batch() -> None:
    stream = PackedStream(BuiltinCorpus("validation"), 16, seed=0)
    batch = next(Loader(stream, global_batch=2))
    rows = documents.documents_of(stream, batch)
    assert [row.instance for row in rows] == [0, 1]
    held = [[token for part in row.tokens for token in part] for row in rows]
    assert held == batch.tokens.tolist()
