"""A model of lm_eval (lm-evaluation-harness) on run directories, without an export.

    import lm_eval
    from forge_lab.lm_harness import Forge

    lm_eval.simple_evaluate(model=Forge("runs/mine"), tasks=["my_task"])

Needs lm_eval, 0.4.13 or newer, which is not an extra of this package. Under torchrun, srun or RANK/WORLD_SIZE the ranks
divide the requests, and each tp group computes its own together.
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from forge_core import SamplingConfig, generate_stream
from forge_data import Tokenizer
from forge_data.tokenizer import encode_prompt
from forge_lab._shared.paths import user_path
from forge_lab._shared.problems import invalid
from forge_lab.evaluate import checked_job
from forge_lab.text import is_hf_folder, task_options, truncate
from forge_parallel import Meshes, ParallelConfig, find_world, make_meshes, parallelize
from forge_parallel.axes import sharded_logits_vocab_size, sharded_logits_width
from forge_resilience import Agreement
from forge_train import load_folder, load_model
from forge_train.errors import ConfigError, config_errors
from forge_train.toolkit import init_ranks, run_tokenizer

__all__ = ["Forge"]

_NEW_TOKENS = 256  # of tasks that set no number


@dataclass(frozen=True)
class _Text:
    """A text to generate for a task: ids of the prompt, and when it ends."""

    prompt: list[int]
    num_new: int
    temperature: float
    until: tuple[str, ...]


@register_model("forge")
class Forge(TemplateLM):  # type: ignore[misc, unused-ignore]
    """The newest good checkpoint of a run, or a folder of Hugging Face, with fp32 weights.

        Forge("runs/mine", batch_size=8).loglikelihood(requests)
        Forge("runs/mine", tp=2)                    # in a script under torchrun, on every rank

    A context that is longer than max_seq_len loses its beginning; a continuation that is longer is a ConfigError.
    Contexts begin as the tokenizer begins a text. A request without a context follows the token that begins a text, or
    else the one after a document, as sequences of training do; ConfigError where the tokenizer has neither.

    On several ranks every rank calls every method with all requests and returns all answers; lm_eval's own rank is 0 of
    1 on each, and `simple_evaluate` returns its result on the first rank of a host. Batches are those of one process. The
    axes are keys of [parallel]; ranks that no axis takes divide the batches. Texts are generated with tp = 1. `meshes`
    are those of a group that runs already, `Meshes(device)` for this rank only. Cost: the batches of a data rank, one
    exchange of all answers, and for generated texts one small exchange a token.
    """

    def __init__(
        self,
        path: str,
        batch_size: int | str = 8,
        device: str | None = None,
        dp_replicate: int = 1,
        tp: int = 1,
        sequence_parallel: bool = True,
        ep: int = 1,
        meshes: Meshes | None = None,
    ) -> None:
        super().__init__()
        self.path, self.batch_size = str(path), int(batch_size)
        with config_errors():
            self._parallel = ParallelConfig(
                device=device or "auto",  # type: ignore[arg-type]
                precision="fp32",
                dp_replicate=dp_replicate,
                tp=tp,
                sequence_parallel=sequence_parallel,
                ep=ep,
            )

        folder = user_path(path)
        imported = is_hf_folder(folder)
        self._meshes = self._init_ranks(folder, imported) if meshes is None else meshes
        self._agreement = Agreement(self._meshes.host_group, alone=self._meshes.world_size == 1)
        self._model, self._tokens = self._open(folder, imported)
        self.max_length: int = getattr(getattr(self._model, "config", None), "max_seq_len", 2048)

    def _init_ranks(self, folder: Path, imported: bool) -> Meshes:
        """The meshes of the group that runs, or of a new one, which ends with the process.

        ConfigError for a layout that does not fit, before the ranks wait for each other.
        """
        with config_errors():
            world = find_world()
            if dist.is_initialized() or world.world_size == 1:
                return make_meshes(self._parallel)
            self._parallel.axes(world.world_size, world.local_world_size)
        if not imported:
            checked_job(folder, None, 1, self._parallel, world)

        stack = ExitStack()
        found = stack.enter_context(init_ranks(self._parallel))
        atexit.register(stack.close)
        return found

    def _open(self, folder: Path, imported: bool) -> tuple[nn.Module, Tokenizer]:
        """Load the model and its tokenizer."""
        parallel, meshes = self._parallel, self._meshes
        if not imported:
            model, config, _ = load_model(folder, meshes.device, parallel=parallel, meshes=meshes)
            return model, run_tokenizer(config)
        if parallel.ep > 1:
            rule = f"shards the experts of a run, and {folder} is a folder of Hugging Face"
            fix = "import it (forge-train import) and train a step, or use ep = 1"
            raise invalid("ep", "unsupported", parallel.ep, rule, fix, kind=ConfigError)

        model, tokens = load_folder(folder, "cpu" if meshes.world_size > 1 else meshes.device)
        with config_errors():
            return parallelize(model, parallel, meshes).eval(), tokens

    @property
    def eot_token_id(self) -> int:
        """The id after the end of a document."""
        if self._tokens.eos_id is None:
            rule = "has a tokenizer without an end token, after which a text without context begins"
            fix = "use tasks with contexts"
            raise invalid("path", "no_end", self.path, rule, fix, kind=ConfigError)
        return self._tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context: the first that begins a text, or else the one after a document."""
        begin = getattr(self._tokens, "begin_ids", ())
        return int(begin[0]) if begin else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """The key of the tokenizer in caches of lm_eval."""
        return self._tokens.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Encode a text after the ids that begin one, once, also if the text spells them; False leaves them out."""
        if add_special_tokens is False:
            return list(self._tokens.encode(string))
        return encode_prompt(self._tokens, string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Score each (_, context, continuation): (log-probability of the continuation, whether greedy decoding writes it)."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1] + requests[i][2]))
        size = self.batch_size
        batches = [order[first : first + size] for first in range(0, len(order), size)]
        self._require_same_requests([pair for _, *pair in requests])
        self._require_lengths(requests)

        found: list[tuple[int, float, bool]] = []
        for batch, mine in self._batches_of_rank(batches):
            scores = list(self._score([requests[i][1:] for i in batch]))
            found += [(i, *score) for i, score in zip(batch, scores) if mine]
        return [(value, greedy) for value, greedy in self._of_all_ranks(found)]

    def _require_same_requests(self, asked: Any) -> None:
        """Raise ConfigError unless all ranks have the same requests: else they would wait for each other."""
        digests = self._agreement.exchange(hashlib.sha256(repr(asked).encode()).hexdigest())
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            rule = f"must be the same on all ranks, and ranks {other} have others than rank 0"
            fix = "give every rank all of them, with the same seeds and without use_cache"
            raise invalid("requests", "mismatch", ..., rule, fix, kind=ConfigError)

    def _require_lengths(self, requests: Sequence[tuple[Any, list[int], list[int]]]) -> None:
        """Raise ConfigError for a request that cannot be scored in full."""
        for number, (text, context, ids) in enumerate(requests):
            where = f"request {number} {text!r:.80}"
            if not context or not ids:
                rule, fix = "needs tokens before and of the continuation", "correct the task"
                raise invalid("requests", "empty", [], rule, fix, where=where, kind=ConfigError)
            if len(ids) > self.max_length:
                rule = f"tokens of the continuation are more than the model's max_seq_len {self.max_length}"
                fix = "leave the task out, or use a model of longer sequences"
                value = len(ids)
                raise invalid("requests", "length", value, rule, fix, where=where, kind=ConfigError)

    def _batches_of_rank(self, batches: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
        """Yield this data rank's batches, and whether its answer counts.

        A rank with fewer batches repeats the last one: the ranks gather sharded weights together.
        """
        readers, reader = self._meshes.batch_size, self._meshes.batch_rank
        for first in range(0, len(batches), readers):
            i = first + reader
            counts = i < len(batches) and self._meshes.is_batch_leader
            yield batches[min(i, len(batches) - 1)], counts

    def _of_all_ranks(self, found: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
        """Gather the answers of all ranks, in the order of the requests, without their numbers."""
        answers = self._agreement.exchange(found)
        return [answer for _, *answer in sorted(a for of_rank in answers for a in of_rank)]

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        # the last token is only predicted, so a sequence may have one more than the model's length
        sequences = [
            torch.tensor((context + ids)[-(self.max_length + 1) :]) for context, ids in pairs
        ]
        tokens = pad_sequence([ids[:-1] for ids in sequences], batch_first=True)  # (B, S)
        multiple = self._meshes.tp.size if self._parallel.sequence_parallel else 1
        tokens = nn.functional.pad(tokens, (0, -tokens.size(1) % multiple))
        lengths = torch.tensor([len(ids) - 1 for ids in sequences])
        is_padding = torch.arange(tokens.size(1)) >= lengths[:, None]
        documents = torch.where(is_padding, -1, 0)  # padding is a document of its own

        device = self._meshes.device
        # (B, S, V), or (B, S, V / tp) where the head is sharded
        logits = self._model(tokens.to(device), document_ids=documents)
        if logits.size(1) != tokens.size(1):
            rule = f"splits the sequences of {self.path} before its head, and tasks need full ones"
            fix = "use sequence_parallel=False, or tp=1"
            raise invalid("sequence_parallel", "unsupported", True, rule, fix, kind=ConfigError)

        for sequence, (_, ids), own in zip(sequences, pairs, logits):
            end = len(sequence) - 1
            logs = self._gather_vocab(own[end - len(ids) : end]).float().log_softmax(-1)
            wanted = sequence[-len(ids) :].to(device)
            chosen = logs.gather(1, wanted[:, None])
            yield float(chosen.sum()), bool((logs.argmax(-1) == wanted).all())

    def _gather_vocab(self, logits: Tensor) -> Tensor:
        """Gather logits (N, V), of which each tp rank may have a shard (N, V / tp)."""
        tp = self._meshes.tp
        if tp.size == 1 or logits.size(-1) != sharded_logits_width(self._model):
            return logits
        shards = [torch.empty_like(logits) for _ in range(tp.size)]
        dist.all_gather(shards, logits.contiguous(), group=tp.group)
        return torch.cat(shards, -1)[:, : sharded_logits_vocab_size(self._model)]  # without padding

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of full texts, in windows of max_seq_len tokens, each token once."""
        asked, sizes = [], []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text, False), self.prefix_token_id, self.max_length, 1
            )
            own = [(None, *make_disjoint_window(window)) for window in windows]
            asked += own
            sizes.append(len(own))
        values = iter(value for value, _ in self._loglikelihood_tokens(asked))
        return [sum(next(values) for _ in range(size)) for size in sizes]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts, greedy unless the task asks for a temperature, up to the first of its `until`."""
        if self._meshes.tp.size > 1:
            rule = "shards the model, and texts are generated by full ones"
            fix = "run tasks that generate with tp=1, on data ranks or ep"
            raise invalid("tp", "unsupported", self._meshes.tp.size, rule, fix, kind=ConfigError)

        asked = [self._text(*request.args) for request in requests]
        self._require_same_requests(asked)
        found: list[tuple[int, str]] = []
        # by length: the ranks write the same number of tokens together
        for num_new in sorted({text.num_new for text in asked}):
            same_length = [i for i, text in enumerate(asked) if text.num_new == num_new]
            for i, mine in self._batches_of_rank(same_length):
                written = self._continue(asked[i])
                found += [(i, written)] if mine else []
        return [text for (text,) in self._of_all_ranks(found)]

    def _text(self, context: str, options: dict[str, Any]) -> _Text:
        new = int(options.get("max_gen_toks", _NEW_TOKENS))
        if new >= self.max_length:
            rule = f"must be below the model's max_seq_len {self.max_length}"
            raise invalid("max_gen_toks", "range", new, rule, "lower it", kind=ConfigError)
        prompt = (self.tok_encode(context) or [self.eot_token_id])[-(self.max_length - new) :]
        return _Text(prompt, new, *task_options(options))

    def _continue(self, asked: _Text) -> str:
        """Generate the text of this data rank, until the texts of all ranks have ended."""
        sampling, ends = SamplingConfig(temperature=asked.temperature), {*self._tokens.end_ids}
        ids: list[int] = []
        for column in generate_stream(self._model, [asked.prompt], asked.num_new, sampling):
            ids.append(int(column))
            if all(self._agreement.exchange(not ends.isdisjoint(ids))):
                break
        return truncate(
            self._tokens.decode([*takewhile(lambda i: i not in ends, ids)]), asked.until
        )
