"""Completions and scores of a model: `load` a folder, then `generate` and `score`."""

import collections
import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence

import jax

from fp8jax import axes, hub, mesh
from fp8jax.config import layout as layout_checks
from fp8jax.config import registry
from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import ConfigErrors, UserError, read_json
from fp8jax.generation import batching, checks, decode, weights
from fp8jax.generation import cache as cache_lib
from fp8jax.generation.completion import ERROR, Completion, Growing
from fp8jax.generation.sampling import row_seed
from fp8jax.generation.settings import (
  CACHE_FORMATS,
  CODES,
  COMPUTE,
  FOLDER,
  VALUES,
  WEIGHT_FORMS,
  Sampling,
)
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import kv_scales
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree

# (index of the prompt, number of the sample, piece of text, the completion with its last piece).
OnText = Callable[[int, int, str, Completion | None], None]

NOT_FINITE = (
  "the weights are damaged or diverged, or a scale in their folder is too large; look at the run's "
  "losses, or generate in generate.precision='bf16'"
)
# Tokens of a prompt in a message.
_SHOWN = 16


class Generator:
  """A model, its tokenizer and its compiled programs.

  Attributes:
    end_ids: tokens that end a completion.
    max_length: tokens of the longest prompt and completion together.
    folder: with the tokenizer's files and settings; "" if there is none.
    cache_bytes_per_token: of keys and values, all layers.
  """

  def __init__(
    self, params, sites, cfg: ModelConfig, run: ComputeConfig, tokenizer: Tokenizer,
    end_ids: Sequence[int], *, slots: int = 8, cache_format: str = COMPUTE,
    max_length: int = 0, folder: str = "", weight_form: str = CODES,
  ):  # fmt: skip
    """
    Args:
      params: as they are stored.
      sites: of all GEMMs; delayed and static scales with their states.
      run: how it computes. Its layout says where: rows over the axes of B, heads, features and
        vocabulary over those of H and G, F and V; weights lie as Layout.served says.
      slots: sequences that are decoded together, rounded up to a multiple of the devices that rows
        are split over.
      cache_format: "compute" for run.dtype, or another of settings.CACHE_FORMATS; "e4m3_folder"
        takes the scales of keys and values of `folder`.
      max_length: positions of the cache; 0 takes as many as a call needs. A fixed number makes
        completions independent, to the bit, of the lengths of a call's other prompts.
      weight_form: of settings.WEIGHT_FORMS; "values" are of sites that run on "dequantized".

    Raises:
      UserError: the model or its configuration cannot be generated with; all reasons.
    """
    problems = ConfigErrors()
    problems.extend(checks.of_model(cfg, run))
    if run.is_invariant:
      problems.extend(checks.not_invariant(cfg, run, sites))
    problems.check(slots >= 1, f"slots={slots} must be at least 1")
    problems.one_of("cache_format", cache_format, CACHE_FORMATS)
    problems.one_of("weight_form", weight_form, WEIGHT_FORMS)
    longest = cfg.max_positions
    problems.check(
      0 <= max_length <= longest,
      f"max_length={max_length} must be from 0 to {longest}, the longest context of the model",
    )
    problems.refuse()
    self.vocab_size = cfg.vocab_size
    self.tokenizer, self.end_ids, self.folder = tokenizer, frozenset(end_ids), folder
    self.max_length, self._is_fixed = max_length or longest, bool(max_length)
    self.cache_bytes_per_token = cache_lib.bytes_per_token(cfg, cache_format, run.dtype.itemsize)
    device = choose.current_device()
    run = decode.served(cfg, run, device, self.max_length)
    self._dtype, self._weight_form = run.dtype, weight_form
    options = choose.compiler_options(device)
    scales = kv_scales.read(folder, cfg) if cache_format == FOLDER else None
    self._engine = batching.Engine(cfg, run, slots, cache_format, options, scales)
    self.take(params, sites)

  def take(self, params, sites):
    """Takes other parameters; programs of the same recipes are not compiled again.

    Raises:
      UserError: the generator keeps values, and a site multiplies codes.
    """
    problems = ConfigErrors()
    problems.extend(checks.of_values(self._weight_form, sites))
    problems.refuse()
    self.release()
    how = self._engine.cfg, self._dtype, self._weight_form == VALUES
    made = weights.for_inference(params, sites, *how)
    self._engine.weights = (made, decode.served_sites(sites))

  def release(self):
    """Frees the parameters; `take` comes before the next call."""
    self._engine.weights = ()

  def generate(
    self,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    num_samples: int = 1,
    on_text: OnText | None = None,
    numbers: Sequence[int] = (),
  ) -> list[list[Completion]]:
    """Completes every prompt so many times.

    A completion depends on its prompt, the sampling and its number, and on no other prompt; a
    prompt that occurs again goes on with the numbers. Greedy samples of a prompt are equal.

    Args:
      prompts: token ids, at least one each.
      on_text: is called with every piece of text as it becomes certain, a greedy copy in one.
      numbers: of every prompt's first completion, where others have been drawn before.

    Returns:
      For every prompt its completions; see `not_finite`.

    Raises:
      UserError: a prompt is empty, leaves no room for a token or has an id beyond the vocabulary; a
        value of `sampling`.
    """
    problems = ConfigErrors()
    problems.extend(sampling.problems())
    problems.check(num_samples >= 1, f"num_samples={num_samples} must be at least 1")
    problems.extend(self._prompt_problems(prompts))
    problems.refuse()
    stop_ids = {s: self.tokenizer.special_id(s) for s in sampling.stop}
    texts = [*sampling.stop]  # a special token's, too: others may spell it
    ids = frozenset(token for token in stop_ids.values() if token is not None)
    draws = 1 if sampling.temperature == 0 else num_samples
    growing: dict[tuple[int, int], Growing] = {}
    done: dict[tuple[int, int], Completion] = {}
    requests, seen = [], collections.Counter()
    for index, prompt in enumerate(map(tuple, prompts)):
      limit = min(sampling.max_new_tokens, self.max_length - len(prompt))
      for number in range(draws):
        of = numbers[index] + number if numbers else seen[prompt]
        seed, seen[prompt] = row_seed(sampling.seed, prompt, of), seen[prompt] + 1
        requests.append(batching.Request(prompt, limit, seed, index, number))
        growing[index, number] = Growing(self.tokenizer.decode, texts, self.end_ids, ids, limit)

    def push(request: batching.Request, token: int, logp: float) -> bool:
      place = request.index, request.number
      piece = growing[place].push(token, logp)
      if result := growing[place].result:
        done[place] = result
      if on_text is not None and (piece or result):
        on_text(*place, piece, result)
        for number in range(draws, num_samples) if result else ():
          on_text(request.index, number, done[place].text, done[place])
      return result is not None

    needed = max((len(r.prompt) + r.limit for r in requests), default=1)
    length = self.max_length if self._is_fixed else batching.bucket(needed, self.max_length)
    self._engine.run(requests, sampling, length, push)
    return [[done[i, n % draws] for n in range(num_samples)] for i in range(len(prompts))]

  def score(
    self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
  ) -> list[tuple[float, bool]]:
    """Log-probabilities of continuations.

    Args:
      sequences: (context, continuation) as token ids, both not empty.

    Returns:
      For each (sum of the log-probabilities of the continuation's tokens, in nats; whether greedy
      generation would give it).

    Raises:
      UserError: a part is empty, has an id beyond the vocabulary, or both together are too long
        for the model; the log-probability of a sequence is not finite.
    """
    problems = ConfigErrors()
    for i, (context, continuation) in enumerate(sequences):
      problems.check(
        bool(len(context) and len(continuation)),
        f"sequence {i} has {len(context)} tokens of context and {len(continuation)} of "
        "continuation, expected at least one of each; begin an empty context with the "
        "end-of-document token",
      )
      length = len(context) + len(continuation)
      problems.check(
        length - 1 <= self.max_length,
        f"sequence {i} has {length} tokens, expected at most {self.max_length + 1}: cut its "
        "context on the left",
      )
      problems.extend(self._unknown(f"sequence {i}", [*context, *continuation]))
    problems.refuse()
    scored = self._engine.score([(*context, *rest) for context, rest in sequences])
    scores = [
      (float(logp[-len(rest) :].astype("float64").sum()), bool(is_best[-len(rest) :].all()))
      for (_, rest), (logp, is_best) in zip(sequences, scored, strict=True)
    ]
    wrong = [i for i, (logp, _) in enumerate(scores) if not math.isfinite(logp)]
    if wrong:
      begin = self._begin((*sequences[wrong[0]][0], *sequences[wrong[0]][1]))
      raise UserError(f"sequence {wrong[0]} ({begin}) has logits that are not finite; {NOT_FINITE}")
    return scores

  def not_finite(
    self, prompts: Sequence[Sequence[int]], completions: list[list[Completion]]
  ) -> str:
    """A sentence about the completions that ended for reason "error"; "" without any."""
    bad = [(i, c) for i, own in enumerate(completions) for c in own if c.finish_reason == ERROR]
    if not bad:
      return ""
    index, first = bad[0]
    return (
      f"{len(bad)} of {sum(map(len, completions))} completions ended early: prompt {index} "
      f"({self._begin(prompts[index])}) has logits that are not finite after {len(first.tokens)} "
      f"tokens; {NOT_FINITE}"
    )

  def _prompt_problems(self, prompts) -> list[str]:
    texts = []
    for i, prompt in enumerate(prompts):
      if not len(prompt):
        texts.append(f"prompt {i} is empty, expected at least one token")
      elif len(prompt) >= self.max_length:
        texts.append(
          f"prompt {i} has {len(prompt)} tokens and the model takes {self.max_length} together "
          "with the completion: shorten it"
        )
      texts += self._unknown(f"prompt {i}", prompt)
    return texts

  def _unknown(self, where: str, ids: Sequence[int]) -> list[str]:
    """A sentence about ids that the embedding has no row for, which it would clip in silence."""
    beyond = [i for i in ids if not 0 <= i < self.vocab_size]
    return [f"{where} has the id {i}, expected 0 to {self.vocab_size - 1}" for i in beyond[:1]]

  def _begin(self, tokens: Sequence[int]) -> str:
    text = self.tokenizer.decode(tokens[:_SHOWN], special=True)
    return repr(text) + "..." * (len(tokens) > _SHOWN)


def load(
  folder: str, *, recipe: str = "bf16", compute_dtype: str = "auto", slots: int = 8,
  cache_format: str = COMPUTE, max_length: int = 0, stop_tokens: Sequence[str] = (),
  data: int = 1, tensor: int = 1, is_invariant: bool = False, weight_form: str = CODES,
) -> Generator:  # fmt: skip
  """The generator of a Hugging Face folder.

  Args:
    folder: with config.json, safetensors and tokenizer.json; or a hub id that is in the cache.
    recipe: of the linear layers of attention and MLP; the head stays in the compute dtype.
    compute_dtype: "float32", "bfloat16", or "auto": bfloat16 on GPUs, float32 on the CPU.
    slots, cache_format, max_length: see Generator.
    stop_tokens: names of further end tokens.
    data, tensor: devices that sequences, and heads, features and vocabulary, are split over. Where
      `tensor` does not divide the key heads, each device has the keys of all.
    is_invariant: precision.invariant.
    weight_form: see Generator; "values" takes kernels.matmul="dequantized".

  Raises:
    UserError, FileNotFoundError: the folder is incomplete or holds another kind of model, or the
      devices do not divide it: a scale tile of a weight lies on one.

  Example:
    generator = load("assets/smollm2-135m", recipe="block_128")
    ids = generator.tokenizer.encode_prompt("The capital of France is")
    [[completion]] = generator.generate([ids], Sampling(max_new_tokens=8))
  """
  device = choose.current_device()
  cfg = hf_config.read_config(folder)
  if cfg.reward_head:
    raise UserError(f"{folder!r} holds a reward model, which scores texts and writes none")
  dtype = choose.compute_dtype(device) if compute_dtype == "auto" else compute_dtype
  problems = ConfigErrors()
  problems.one_of("weight_form", weight_form, WEIGHT_FORMS)
  problems.extend(checks.of_values(weight_form, ()))
  problems.refuse()
  layout = problems.attempt(lambda: _layout(data, tensor, cfg.num_kv_heads)) or axes.LOCAL
  run = ComputeConfig(jax.numpy.dtype(dtype), layout=layout, is_invariant=is_invariant)
  rules = (("head", "bf16"), ("layers/.*", recipe))
  declaration = transformer.site_params(cfg)
  of_model = (transformer.params(cfg), declaration, cfg)
  texts = layout_checks.uneven(*of_model, [rules], layout, None, _smaller)
  of_sites = (declaration, cfg.dims, rules, layout, None)
  texts += layout_checks.find_broken_rotations(*of_sites)
  problems.extend([text.replace("mesh.tensor", "`tensor`") for text in texts])
  problems.refuse()
  matmul = "dequantized" if weight_form == VALUES else "auto"
  backends = site_tree.Backends(matmul, device, slots // data)
  sites = site_tree.build_sites(declaration, cfg.dims, rules, layout, backends=backends)
  kept = weights.multiplied_as_codes(site_tree.recipes_of(sites))
  params, _ = hf_weights.load_params(folder, cfg, layout, kept)
  tokenizer = Tokenizer(folder)
  if beyond := tokenizer.beyond(cfg.vocab_size):
    raise UserError(*beyond)
  return Generator(
    params, site_lib.with_current_scales(sites), cfg, run, tokenizer,
    end_ids(folder, tokenizer, stop_tokens), slots=slots, cache_format=cache_format,
    max_length=max_length, folder=folder, weight_form=weight_form,
  )  # fmt: skip


def _layout(data: int, tensor: int, key_heads: int) -> axes.Layout:
  if data * tensor == 1:
    return axes.LOCAL
  if data * tensor != (count := jax.device_count()):
    raise UserError(
      f"data={data}, tensor={tensor} are {data * tensor} devices, and there are {count}: give two "
      f"whose product is {count}, or none of them for one device"
    )
  shape = mesh.resolve({"data": data, "fsdp": 1, "tensor": tensor}, jax.device_count())
  acts = dict(registry.at(registry.base(), "sharding.acts"))
  if key_heads % tensor:
    acts["G"] = ()
  return axes.Layout(mesh.make(shape), acts=axes.as_rules(acts)).served()


def _smaller(letter: str, kind: str, split: Mapping[str, tuple[str, ...]]) -> str:
  return f"; give a smaller `{split[kind][0]}`, that divides it"


def end_ids(folder: str, tokenizer: Tokenizer, stop_tokens: Sequence[str] = ()) -> list[int]:
  """Tokens that end a completion: those of generation_config.json, else config.json, else the
  tokenizer's, as in transformers; and `stop_tokens`. The model's folder may be "", for none.

  Raises:
    UserError: a file states something else than ids, or the tokenizer has no token of that name.
  """
  ids = []
  for name in ("generation_config.json", "config.json"):
    path = os.path.join(hub.local(folder), name)
    if ids or not folder or not os.path.exists(path):
      continue
    stated = read_json(path, "correct it, or fetch it again").get("eos_token_id")
    stated = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if any(not isinstance(i, int) or isinstance(i, bool) for i in stated):
      raise UserError(f"{path}: eos_token_id is {stated!r}, expected ids; correct it")
    ids = stated
  with contextlib.suppress(*[UserError] * bool(stop_tokens)):  # a tokenizer without an end
    ids = ids or [tokenizer.eos_id]
  for name in stop_tokens:
    token = tokenizer.token_id(name)
    if token is None:
      raise UserError(f"stop token {name!r} is no token of {tokenizer.path}; give one that it has")
    ids = [*ids, token]
  return ids
