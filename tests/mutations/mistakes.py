"""A list of small mistakes, each in one place of the source, to measure what the tests catch.

`hatch run mutations` plants one at a time in a copy of the tree and runs tests on it. A mistake with `seen`
is caught: at least one test fails with it and passes without. `seen=False` marks a mistake that no test
catches today: it was planted, and the tests passed. Set it to True with the test that catches it.
"""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """`right` occurs once in `file`; the mistake is `wrong` in its place."""

    name: str
    file: str
    right: str
    wrong: str
    seen: bool = True
    """False: no test catches it today."""


_CORE = "packages/forge-core/src/forge_core"
_MOE = "packages/forge-moe/src/forge_moe"
_PARALLEL = "packages/forge-parallel/src/forge_parallel"
_DATA = "packages/forge-data/src/forge_data"
_CKPT = "packages/forge-ckpt/src/forge_ckpt"
_RESILIENCE = "packages/forge-resilience/src/forge_resilience"
_VLM = "packages/forge-vlm/src/forge_vlm"
_TRAIN = "apps/train/src/forge_train"
_LAB = "apps/lab/src/forge_lab"

MISTAKES: tuple[Mistake, ...] = (
    # forge-core
    Mistake(
        "keys are rotated in the opposite direction",
        f"{_CORE}/model/rope.py",
        "value=-direction",
        "value=direction",
    ),
    Mistake(
        "the gradient of a masked label is kept",
        f"{_CORE}/_shared/cross_entropy.py",
        "scale = grads[0] * (valid if weights is None else weights)[:, None]",
        "scale = grads[0] * torch.ones_like(valid)[:, None]",
    ),
    Mistake(
        "the first step of an average divides by zero",
        f"{_CORE}/optim/schedule_free.py",
        "correction = -torch.expm1(step *",
        'correction = -torch.expm1(old["step"] *',
    ),
    Mistake(
        "the decay of wsd begins a step late",
        f"{_CORE}/optim/schedule.py",
        "total_steps - steps, total_steps, _SHAPES",
        "total_steps - steps + 1, total_steps, _SHAPES",
    ),
    Mistake(
        "norms and biases decay",
        f"{_CORE}/optim/groups.py",
        "for name, p in parameters.items() if is_matrix(kinds[name])]",
        "for name, p in parameters.items()]",
    ),
    Mistake(
        "documents of a packed row attend to each other",
        f"{_CORE}/model/attention_ops.py",
        "changed = document_ids[:, 1:] != document_ids[:, :-1]",
        "changed = document_ids[:, 1:] < document_ids[:, :-1]",
    ),
    Mistake(
        "an attention window has one token too many",
        f"{_CORE}/model/attention_ops.py",
        "(distance < window)",
        "(distance <= window)",
    ),
    Mistake(
        "a frozen group keeps its gradients",
        f"{_CORE}/optim/groups.py",
        "parameter.requires_grad_(multiplier != 0.0)",
        "parameter.requires_grad_(True)",
    ),
    Mistake(
        "a stage begins a step late",
        f"{_CORE}/optim/stages.py",
        "stage.start_step <= step:",
        "stage.start_step < step:",
    ),
    Mistake(
        "compute-optimal sizes take the exponent of the other term",
        f"{_CORE}/scaling.py",
        "parameters = scale * product ** (self.beta / total)",
        "parameters = scale * product ** (self.alpha / total)",
    ),
    Mistake(
        "a LoRA update is added in the dtype of the weight",
        f"{_CORE}/lora.py",
        "(weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)",
        "weight + (scale * (b.float() @ a.float())).to(weight.dtype)",
    ),
    Mistake(
        "the fused loss keeps the weight gradient of its last block of rows only",
        f"{_CORE}/_shared/cross_entropy.py",
        "total[rows].add_(torch.mm(",
        "total[rows].copy_(torch.mm(",
    ),
    Mistake(
        "the random numbers of a sample repeat after each chunk",
        f"{_CORE}/generate.py",
        "torch.rand(self._CHUNK, generator=g, device=",
        "torch.rand(self._CHUNK, generator=g.clone_state(), device=",
    ),
    # forge-moe
    Mistake(
        "capacity 1.1 rounds up by one",
        f"{_MOE}/router.py",
        " * (1 - 1e-9)",
        "",
    ),
    Mistake(
        "evaluation drops what is over capacity",
        f"{_MOE}/layer.py",
        "return self.training and self.config.capacity_factor is not None",
        "return self.config.capacity_factor is not None",
    ),
    Mistake(
        "evaluation counts as load of experts",
        f"{_MOE}/layer.py",
        "self.counters.add(counts, sums, training=self.training)",
        "self.counters.add(counts, sums, training=True)",
    ),
    Mistake(
        "a skipped step moves the biases of experts",
        f"{_MOE}/hooks.py",
        "target.copy_(value if skip is None else torch.where(skip > 0, target, value))",
        "target.copy_(value)",
    ),
    Mistake(
        "gradients of a token's experts are summed in 16 bits",
        f"{_MOE}/dispatch/exchange.py",
        "wide = torch.promote_types(wire.dtype, torch.float32)",
        "wide = wire.dtype",
    ),
    Mistake(
        "the counts of a global batch are not reset at the end of a step",
        f"{_MOE}/load_balancing.py",
        "self.step_counts = self.global_step_counts = None",
        "self.step_counts = None",
    ),
    Mistake(
        "equal router scores go to the higher expert id",
        f"{_MOE}/router.py",
        "torch.arange(num - 1, -1, -1, device=scores.device)",
        "torch.arange(num, device=scores.device)",
    ),
    Mistake(
        "the largest bias is reported by global rank 0 instead of by each stage",
        f"{_MOE}/hooks.py",
        "dist.get_rank(group)",
        "dist.get_rank()",
    ),
    Mistake(
        "a skipped step replaces the lagged counts",
        f"{_MOE}/hooks.py",
        "_write(layer.lagged_counts, total, skip)",
        "_write(layer.lagged_counts, total, None)",
    ),
    Mistake(
        "all upcycled tensors get the same noise",
        f"{_MOE}/upcycle.py",
        "torch.randn(stack.shape, generator=generator)",
        "torch.randn(stack.shape, generator=generator.manual_seed(seed))",
    ),
    # forge-parallel
    Mistake(
        "a cut weight can be read by all code",
        f"{_PARALLEL}/axes/local.py",
        "if parameter.placements[0].is_shard() and not module.in_forward:",
        "if parameter.placements[0].is_shard() and module.in_forward is None:",
    ),
    Mistake(
        "weights of an evaluation stay gathered",
        f"{_PARALLEL}/axes/fsdp.py",
        "        module.reshard()  # type: ignore[operator]",
        "        pass",
    ),
    Mistake(
        "parameters unused on a rank are not reduced",
        f"{_PARALLEL}/axes/fsdp.py",
        "    reduce_unused_parameters(units)\n",
        "",
    ),
    Mistake(
        "a block that was frozen at first sums gradients in bf16 ever after",
        f"{_PARALLEL}/axes/fsdp.py",
        "        refresh_grad_dtypes(module)",
        "        pass",
    ),
    Mistake(
        "parts of points under tp go to the wrong ranks",
        f"{_PARALLEL}/points.py",
        "return value.chunk(self.tp.size, dim)[self.tp.rank]",
        "return value.chunk(self.tp.size, dim)[self.tp.rank - 1]",
    ),
    Mistake(
        "a global batch that does not divide evenly gets one micro-batch too few",
        f"{_PARALLEL}/compute.py",
        "count = -(-global_batch // (size * readers))",
        "count = global_batch // (size * readers)",
    ),
    Mistake(
        "an interval inside a longer one shortens their union",
        f"{_PARALLEL}/profile/breakdown.py",
        "(found[-1][0], max(found[-1][1], end))",
        "(found[-1][0], end)",
    ),
    Mistake(
        "the gradient noise uses the squared sum of labels for the sum of squares",
        f"{_PARALLEL}/gradient_statistics.py",
        "sum(n * n for n in labels)",
        "sum(labels) ** 2",
    ),
    Mistake(
        "a requeued job takes the port of its previous start",
        f"{_PARALLEL}/_shared/launch.py",
        "(7 * job + step + 3 * restarts) % count",
        "(7 * job + step) % count",
    ),
    Mistake(
        "of the cuts with equal highest cost the first is taken and not the most even one",
        f"{_PARALLEL}/pipeline/split.py",
        "lambda so_far, own: so_far + own**2",
        "lambda so_far, own: so_far + own",
    ),
    # forge-data
    Mistake(
        "the epoch's permutation always uses epoch 0",
        f"{_DATA}/order.py",
        "self._permutation = epoch, Permutation(self._n, self._seed, epoch)",
        "self._permutation = epoch, Permutation(self._n, self._seed, 0)",
    ),
    Mistake(
        "a label of a conversation has the weight of the token before it",
        f"{_DATA}/chat/rows.py",
        "weights[start + 1 : start + length]",
        "weights[start : start + length - 1]",
    ),
    Mistake(
        "a document predicts the next one",
        f"{_DATA}/packing.py",
        "labels[row, begins - 1] = IGNORE",
        "labels[begins[begins < 0]] = IGNORE",
    ),
    Mistake(
        "a worker that replaces another is asked for its steps in another order",
        f"{_DATA}/workers.py",
        "                for again in steps:\n",
        "                for again in reversed(steps):\n",
    ),
    Mistake(
        "sequences of an index are taken to follow one another",
        f"{_DATA}/tokens/raw_formats.py",
        "        if wrong.size:\n",
        "        if wrong.size > len(lengths):\n",
    ),
    Mistake(
        "all workers of torch read every step after their first",
        f"{_DATA}/loader.py",
        "            self._skip = worker.num_workers - 1\n",
        "            self._skip = 0\n",
    ),
    Mistake(
        "the digest chain is not compared at a resume",
        f"{_DATA}/loader.py",
        '        raise_problems("loader state", islice(state_problems(state), 1))\n',
        "        islice(state_problems(state), 1)\n",
    ),
    Mistake(
        "files of prepared tokens are not synced before their sidecar",
        f"{_DATA}/_shared/hashed_files.py",
        "        os.fsync(self._file.fileno())\n",
        "",
    ),
    Mistake(
        "the largest id of a raw token file is that of its last part",
        f"{_DATA}/tokens/raw.py",
        "max(high, int(block.max()))",
        "int(block.max())",
    ),
    Mistake(
        "the ids of an index are counted in its last part only",
        f"{_DATA}/tokens/raw_formats.py",
        "count += int(part.sum())",
        "count = int(part.sum())",
    ),
    Mistake(
        "cut documents are not counted at the borders of the parts of a source",
        f"{_DATA}/packing.py",
        "documents[first : first + _OFFSETS_AT_ONCE + 1]",
        "documents[first : first + _OFFSETS_AT_ONCE]",
    ),
    Mistake(
        "a run of tokens is rounded down",
        f"{_DATA}/phase_schedule.py",
        "wanted = math.ceil(tokens / (rows * segment.seq_len))",
        "wanted = math.floor(tokens / (rows * segment.seq_len))",
    ),
    # forge-ckpt
    Mistake(
        "a block is read without a check of its digest",
        f"{_CKPT}/read/blocks.py",
        "if digest_of(block) != entry.blocks[index]:",
        "if not entry.blocks[index]:",
    ),
    Mistake(
        "a save in the background writes the state of later steps",
        f"{_CKPT}/write/save.py",
        "staged = None if self._staged is None else self._staged.bytes_of_file()",
        "staged = None",
    ),
    Mistake(
        "a step is named before its directory is on the disk",
        f"{_CKPT}/directories.py",
        "    atomic.sync_folder(temporary)\n",
        "",
    ),
    Mistake(
        "new random streams ignore the saved state of torch",
        f"{_CKPT}/rng.py",
        '    digest.update(bytes(stream["torch"].tolist()))\n',
        "",
    ),
    Mistake(
        "tensors of a safetensors file may share bytes",
        f"{_CKPT}/_shared/safetensors_headers.py",
        "if entry.start != end:",
        "if entry.start > end:",
    ),
    Mistake(
        "each rank loads the step that it found itself",
        f"{_CKPT}/read/load.py",
        "chosen = Path(ranks.run_on_rank_0(lambda: str(step_path(user_path(path)))))",
        "chosen = step_path(user_path(path))",
    ),
    Mistake(
        "a stage without a tensor that matches refuses the patterns",
        f"{_CKPT}/weights.py",
        "lambda: _match(here if names is None else names, shapes, patterns)",
        "lambda: _match(here, shapes, patterns)",
    ),
    Mistake(
        "a load compares the first block of a file only",
        f"{_CKPT}/read/blocks.py",
        "if digest_of(block) != entry.blocks[index]:",
        "if index == 0 and digest_of(block) != entry.blocks[index]:",
    ),
    Mistake(
        "cached plans ignore placements",
        f"{_CKPT}/write/planner.py",
        "return type(value), value.dtype, tuple(value.shape), layout",
        "return type(value), value.dtype, tuple(value.shape), None",
    ),
    Mistake(
        "a rename is not durable when a save returns",
        f"{_CKPT}/directories.py",
        "    sync_folder(target.parent)  #",
        "    pass  #",
    ),
    Mistake(
        "a background save that fails before its copy is not reported",
        f"{_CKPT}/write/saver.py",
        "            self._background.fail(handle, error)",
        "            handle.set_exception(error)",
    ),
    Mistake(
        "names from a disk are printed as they are",
        f"{_CKPT}/errors.py",
        "c if c.isprintable() else ascii(c)[1:-1]",
        "c",
    ),
    Mistake(
        "tensors of an exported shard are not synced to the disk",
        f"{_CKPT}/_shared/hf_save.py",
        "        os.fsync(fd)\n",
        "",
    ),
    Mistake(
        "gaps of a staged file keep bytes of the save before",
        f"{_CKPT}/write/staging.py",
        "            memory[end : piece.start].zero_()  # the gap before it: equal states make equal files\n",
        "",
    ),
    Mistake(
        "differing elements are counted in the last part of a tensor only",
        f"{_CKPT}/verbs/compare.py",
        "count += int(torch.ne(*bits).any(1).sum())",
        "count = int(torch.ne(*bits).any(1).sum())",
    ),
    # forge-resilience
    Mistake(
        "of two copies that differ one is called the wrong one",
        f"{_RESILIENCE}/replicas.py",
        "known = 2 * count > len(values)",
        "known = 2 * count >= len(values)",
    ),
    Mistake(
        "a checksum is a weighted sum, in which two changes cancel",
        f"{_RESILIENCE}/replicas.py",
        "        _fold_(x, shift).mul_(factor)",
        "        x.mul_(factor)",
    ),
    Mistake(
        "copies of a tensor are looked for along the axes that shard it",
        f"{_RESILIENCE}/replicas.py",
        "slice(None) if p.is_replicate() else i",
        "i if p.is_replicate() else slice(None)",
    ),
    Mistake(
        "a node that is broken together with most others is blamed",
        f"{_RESILIENCE}/health/check.py",
        "return nodes if several == 1 or 2 * len(nodes) <= several else []",
        "return nodes",
    ),
    Mistake(
        "nodes of an earlier life are excluded, too",
        f"{_RESILIENCE}/health/check.py",
        "            nodes.clear()",
        "            pass",
    ),
    Mistake(
        "old errors of a GPU are taken for new ones",
        f"{_RESILIENCE}/health/nvml.py",
        "new = count - self._uncorrected",
        "new = count",
    ),
    Mistake(
        "an event is sent again each time the journal is read",
        f"{_RESILIENCE}/alerts.py",
        "            self.offset = end",
        "            self.offset = self.offset",
    ),
    Mistake(
        "a failed alert prints the words of its command",
        f"{_RESILIENCE}/alerts.py",
        "problem = type(error).__name__",
        "problem = str(error)",
    ),
    Mistake(
        "free nodes that are taken again still count as free since the first time",
        f"{_RESILIENCE}/slurm/orchestrate.py",
        "            self._free = None\n            return\n",
        "            return\n",
    ),
    Mistake(
        "the state of the orchestrator is not synced before its rename",
        f"{_RESILIENCE}/_shared/atomic.py",
        "            os.fsync(file.fileno())\n",
        "",
    ),
    Mistake(
        "a run that resumes at an earlier step keeps the steps that it lost",
        f"{_RESILIENCE}/goodput.py",
        "if lost or step < self.step:",
        "if lost:",
    ),
    Mistake(
        "a sink that hangs is waited for at each save",
        f"{_RESILIENCE}/recorder.py",
        "if self._last_flush is not None and not self._last_flush.is_set():",
        "if self._last_flush is not None and self._last_flush.is_set() is None:",
    ),
    # forge-vlm
    Mistake(
        "packed images attend to each other",
        f"{_VLM}/vision/vit.py",
        "plan = SegmentPlan.of_lengths([lengths])",
        "plan = SegmentPlan.of_lengths([[sum(lengths)]])",
    ),
    Mistake(
        "branches of a document attend to each other",
        f"{_VLM}/sequence/masks.py",
        "together = together & ((branch == 0) | (branch == branches[row, query]))",
        "together = together & (branch >= 0)",
    ),
    Mistake(
        "tokens of one image do not attend to those behind them",
        f"{_VLM}/sequence/masks.py",
        "((key <= query) | ahead)",
        "(key <= query)",
    ),
    Mistake(
        "a window of streamed pictures begins at its last sample",
        f"{_VLM}/_shared/sharded_rows.py",
        "place = batch[0][0]",
        "place = batch[-1][0]",
    ),
    Mistake(
        "rows of a window are shuffled by how many shards a process reads",
        f"{_VLM}/data/streaming.py",
        'self._order(f"window {shard}", len(rows), place)',
        "order_of(len(rows), len(self._shards), place)",
    ),
    Mistake(
        "units of another plan are taken",
        f"{_VLM}/data/prepare.py",
        "plan.read_text() != said",
        "False",
    ),
    Mistake(
        "text behind a cached image continues from the image's time position",
        f"{_VLM}/sequence/positions.py",
        "positions if positions.dim() == 2 else positions.amax(1)",
        "positions if positions.dim() == 2 else positions[:, 0]",
    ),
    Mistake(
        "the end of a shared trunk does not predict the first token of a branch",
        f"{_VLM}/sequence/plan.py",
        "same &= (branches[:, 1:] == branches[:, :-1]) | (branches[:, :-1] == 0)",
        "same &= branches[:, 1:] == branches[:, :-1]",
    ),
    Mistake(
        "samples beyond the first window of a packing plan are never read",
        f"{_VLM}/data/packing.py",
        "return [np.sort(np.array(row)) + first for row in rows]",
        "return [np.sort(np.array(row)) for row in rows]",
    ),
    Mistake(
        "mrope positions exchange time and rows of an image",
        f"{_VLM}/sequence/plan.py",
        'indexing="ij"',
        'indexing="xy"',
    ),
    # apps/train
    Mistake(
        "the trained weights are evaluated in place of their average",
        f"{_TRAIN}/loop/evaluator.py",
        " as pause, run.evaluation_point():",
        " as pause:\n            run.evaluation_point()",
    ),
    Mistake(
        "a failed save waits for the next interval",
        f"{_CKPT}/training.py",
        "self.wants_retry = self._failures == 1",
        "self.wants_retry = False",
    ),
    Mistake(
        "a callback is told of a checkpoint when its own rank knows of it",
        f"{_TRAIN}/loop/trainer.py",
        "run.announce(self._checkpoints.announce(run.decision.saved))",
        "run.announce(self._checkpoints.announce(self._checkpoints.committed))",
    ),
    Mistake(
        "a step uses the learning rate of the step before",
        f"{_TRAIN}/run/run.py",
        "(schedule or self.schedule)(self.course.scheduled(step, tokens))",
        "(schedule or self.schedule)(self.course.scheduled(max(step - 1, 1), tokens))",
    ),
    Mistake(
        "a run begins from fresh weights where an import is",
        f"{_TRAIN}/run/checkpoints.py",
        "if self.store.steps() == [0] and",
        "if self.store.steps() == [] and",
    ),
    Mistake(
        "counters of another step are loaded",
        f"{_TRAIN}/run/checkpoints.py",
        'if progress["step"] != step:',
        'if progress["step"] < 0:',
    ),
    Mistake(
        "a fork that has saved reads its parent again",
        f"{_TRAIN}/loop/fork.py",
        "if init.from_ is None or has_begun(run_dir):",
        "if init.from_ is None:",
    ),
    Mistake(
        "a warm start goes on in the parent's data",
        f"{_TRAIN}/loop/fork.py",
        'rest = (*_CURSOR, *self.saved) if "cursor" in self.init.keep else ()',
        "rest = (*_CURSOR, *self.saved)",
    ),
    Mistake(
        "a fork goes on with heads of another number",
        f"{_TRAIN}/loop/fork.py",
        'or (goes_on and k.startswith("model.")',
        'or (False and k.startswith("model.")',
    ),
    Mistake(
        "a fork of another model initializes missing tensors without an error",
        f"{_TRAIN}/loop/fork.py",
        "if init.patterns or not report.difference:",
        "if True:",
    ),
    Mistake(
        "the schedule of a run with several batch sizes is one batch too short",
        f"{_DATA}/phase_schedule.py",
        "self.scheduled(total_steps, tokens + own)",
        "self.scheduled(total_steps, tokens)",
    ),
    Mistake(
        "a held-out set of another tokenizer is evaluated",
        f"{_TRAIN}/build/resolve.py",
        "load_tokenizer(spec).fingerprint != wanted",
        'load_tokenizer(spec).fingerprint == ""',
    ),
    # apps/lab
    Mistake(
        "a replay begins one checkpoint too late",
        f"{_LAB}/study/private_job.py",
        "before = [s for s in steps if s < step]",
        "before = [s for s in steps if s <= step]",
    ),
    Mistake(
        "marks of the timeline are in seconds for every unit",
        f"{_LAB}/report/goodput.py",
        "(at - ledger.spans[0].begin / 1000) / divisor",
        "at - ledger.spans[0].begin / 1000",
    ),
    Mistake(
        "a sweep ends with the signal of a killed run as its exit code",
        f"{_LAB}/study/queue.py",
        "return max(next(iter(self.failed.values())), ExitCode.ERROR)",
        "return next(iter(self.failed.values()))",
    ),
    Mistake(
        "sets of another file are evaluated next to those of the run",
        f"{_LAB}/evaluate.py",
        "(given is not None and key.startswith(_REPLACED))",
        "(given is not None and key.startswith(_OWN[1:]))",
    ),
    Mistake(
        "activations have one sequence too few after the first batch",
        f"{_LAB}/extract.py",
        "values = {name: value[: count - start] for",
        "values = {name: value[: len(value) - (start > 0)] for",
    ),
    Mistake(
        "parts of another request are used",
        f"{_LAB}/activation_files.py",
        "if other is not None:",
        "if other is None:",
    ),
    Mistake(
        "the report has the longest wait for data in place of the sum",
        f"{_LAB}/report/goodput.py",
        "return sum(waits) if waits",
        "return max(waits) if waits",
    ),
    Mistake(
        "a decay of a study forks one step too early",
        f"{_LAB}/study/runs.py",
        "begin = run.steps - decay",
        "begin = run.steps - decay - 1",
    ),
    Mistake(
        "an array of a study has one element too many",
        f"{_LAB}/study/arrays.py",
        'f"0-{len(runs) - 1}{limit}"',
        'f"0-{len(runs)}{limit}"',
    ),
    Mistake(
        "texts of each batch of prompts begin with the same random numbers",
        f"{_LAB}/text.py",
        "prefill_chunk, first",
        "prefill_chunk, 0",
    ),
)
