"""The input of a decoder whose prompts have images: embeddings with the features of images in place, and rotary positions.

Token ids of images (:mod:`hone.data.images`) name the image and the place of each token. The vision tower computes each image of a forward
pass once, whichever rows have it. Models of a grid (Qwen-VL) give the tokens of an image positions in two dimensions; the text after it
continues at the largest of them. In Gemma the tokens of an image see each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hone.data.image_processor import ImageProcessor, Pixels
from hone.data.images import ImageData, key_of, place_of
from hone.data.ragged import Ragged
from hone.errors import ModelError
from hone.models.attention.packed import SeenAhead
from hone.models.registry import TOWERS

_ATTRIBUTE = "hone_image_processor"


@dataclass(frozen=True)
class PackedImages:
    """Images of the rows of a packed micro-batch."""

    # the images; none where only other ranks have some, which compute the sharded vision tower with this one
    by_key: Mapping[int, ImageData]
    row_ids: Ragged  # the token ids of each row, its prompt and response
    index: Ragged  # for each of these tokens, its index in the packed row


def attach_processor(causal: nn.Module, processor: ImageProcessor | None) -> None:
    if processor is not None:
        setattr(causal, _ATTRIBUTE, processor)


def find_processor(causal: nn.Module) -> ImageProcessor | None:
    return getattr(causal, _ATTRIBUTE, None)


def processor_of(causal: nn.Module) -> ImageProcessor:
    """Return the processor that a model reads images by; ModelError for a model of text."""
    processor = find_processor(causal)
    if processor is None:
        raise ModelError(
            f"{type(causal).__name__} reads no images",
            why="the rows have some",
            fix="use a model for images, such as Qwen3-VL or Gemma 3",
            where="model.path",
            code="R86",
        )
    return processor


def vision_tower(causal: nn.Module) -> nn.Module | None:
    """Return the module that turns pixels into features; None in a model of text.

    In Qwen-VL it includes the layers that merge patches; elsewhere these are a module of their own, such as the connector of
    SmolVLM and the projection of Gemma.
    """
    inner = getattr(causal, "model", None)
    return next((getattr(inner, name) for name in TOWERS if isinstance(getattr(inner, name, None), nn.Module)), None)


def images_by_key(rows: Iterable[Sequence[ImageData]]) -> dict[int, ImageData]:
    """Return the images of rows by key, each once."""
    by_key: dict[int, ImageData] = {}
    for image in (image for row in rows for image in row):
        if by_key.setdefault(image.key, image).content != image.content:
            raise ModelError(
                f"two images have the same key {image.key}",
                why="their tokens would be confused; this happens once in trillions of pairs",
                fix="encode one of them again, for example with another compression",
            )
    return by_key


def decoder_inputs(
    causal: Any, ids: Tensor, images: Mapping[int, ImageData], *, always: bool = False
) -> dict[str, Any]:
    """Return the arguments of the decoder that replace ``input_ids``; ids of images are below 0.

    With ``always`` the vision tower is computed without images too, for a blank one whose features have the weight 0: all
    ranks that share a sharded tower compute it at the same time, forward and backward.
    """
    is_image = ids < 0
    processor = processor_of(causal)
    embedded = causal.get_input_embeddings()(ids.masked_fill(is_image, processor.filler))
    decoder, more = causal.get_decoder(), dict[str, Any]()
    if getattr(decoder, "hidden_size_per_layer_input", 0):  # Gemma 4 embeds a token for each layer, too
        of_text = ids.masked_fill(is_image, decoder.config.pad_token_id)
        more["per_layer_inputs"] = decoder.get_per_layer_inputs(of_text, None)
    if not is_image.any():
        if always:
            features, deep = _features(causal, processor, [processor.blank()], ids.device)
            seen = torch.stack([layer.sum() for layer in (features, *deep)]).sum()
            embedded = embedded + 0.0 * seen.to(embedded.dtype)
        return {"inputs_embeds": embedded, **more}
    tokens = ids[is_image]
    keys, image_of = key_of(tokens).unique(return_inverse=True)
    pixels = [processor.pixels(images[key]) for key in keys.tolist()]
    starts = torch.tensor([0, *(each.count for each in pixels)], device=ids.device).cumsum(0)
    rows = starts[image_of] + place_of(tokens)
    features, deep = _features(causal, processor, pixels, ids.device)
    merged = embedded.masked_scatter(is_image[..., None], features.to(embedded.dtype).index_select(0, rows))
    inputs: dict[str, Any] = {"inputs_embeds": merged, **more}
    if deep:
        inputs["visual_pos_masks"] = is_image
        inputs["deepstack_visual_embeds"] = [layer.to(embedded.dtype).index_select(0, rows) for layer in deep]
    return inputs


def _features(
    causal: Any, processor: ImageProcessor, pixels: Sequence[Pixels], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Return the features of all tokens of the images, ``[tokens, H]``, and those that single layers add."""
    names, along = pixels[0].values, processor.along
    values = {name: torch.cat([each.values[name] for each in pixels], along).to(device) for name in names}
    computed = causal.model.get_image_features(**values, return_dict=True)
    deep = getattr(computed, "deepstack_features", None) or []
    return torch.cat(list(computed.pooler_output)), [torch.cat(list(layer)) for layer in deep]


def rope_positions(rows: Ragged, processor: ImageProcessor, images: Mapping[int, ImageData]) -> tuple[Tensor, Tensor]:
    """Return the rotary positions of rows of tokens in a model of a grid: time, height and width of each.

    A text token has the same position three times, one more than the largest before it. The tokens of an image begin there and
    extend by rows and columns (Qwen2-VL, section 2.1).

    The result is ``[3, tokens]`` of all rows end to end, and for each row the position of the token after it less its number of
    tokens.
    """
    ids, lengths = rows.values, rows.lengths
    is_image, keys = ids < 0, key_of(ids)
    columns, last = torch.ones_like(ids), torch.zeros_like(ids)
    for key in keys[is_image].unique().tolist():
        pixels, members = processor.pixels(images[key]), (keys == key) & is_image
        assert pixels.grid is not None
        columns[members] = pixels.grid[1]
        last[members & (place_of(ids) == pixels.count - 1)] = max(pixels.grid)
    place = torch.where(is_image, place_of(ids), 0)
    advance = torch.where(is_image, last, 1)
    total = torch.cat([torch.zeros(1, dtype=torch.int64), advance.cumsum(0)])
    begin = total[rows.offsets]
    base = total[:-1] - begin[:-1].repeat_interleave(lengths)
    return torch.stack([base, base + place // columns, base + place % columns]), begin.diff() - lengths


def tokens_ahead(ids: Tensor) -> Tensor:
    """Return for each token of rows end to end how many tokens of its image come after it; 0 for text."""
    places, is_image = torch.arange(len(ids)), ids < 0
    following = torch.cat([ids[1:], ids.new_zeros(1)])
    ends = (is_image & (following != ids - 1)).nonzero()[:, 0]
    if not len(ends):
        return torch.zeros_like(ids)
    end = ends[torch.searchsorted(ends, places).clamp(max=len(ends) - 1)]
    return torch.where(is_image, end - places, 0)


def seen_ahead(rows: Ragged, index: Ragged, processor: ImageProcessor, device: torch.device) -> SeenAhead | None:
    """Return the images of rows whose tokens see each other, each packed image once; None if there are none.

    ``index``: of each token of the rows, its index in the packed row.
    """
    starts = ((rows.values < 0) & (place_of(rows.values) == 0)).nonzero()[:, 0]
    if not processor.sees_ahead or not len(starts):
        return None
    begins = rows.offsets[torch.searchsorted(rows.offsets, starts, right=True) - 1]
    ends = starts + tokens_ahead(rows.values)[starts] + 1
    packed = index.values.to(device)
    runs = {
        int(index.values[start]): (packed[start:end], packed[begin:end])
        for begin, start, end in zip(begins.tolist(), starts.tolist(), ends.tolist(), strict=True)
    }
    return SeenAhead(tuple(runs.values()), processor.only_in_windows)


def hidden_states(causal: Any, ids: Tensor, images: PackedImages, context: Any) -> Tensor:
    """Return the last hidden states ``[1, N, H]`` of a packed row with images."""
    processor, positions = processor_of(causal), context.position_ids
    if processor.in_grid:
        by_token, _ = rope_positions(images.row_ids, processor, images.by_key)
        positions = torch.empty(3, 1, ids.shape[1], dtype=torch.int64)
        positions[:, 0, images.index.values] = by_token
    if (ahead := seen_ahead(images.row_ids, images.index, processor, ids.device)) is not None:
        context = dataclasses.replace(context, ahead=ahead)
    return causal.get_decoder()(
        **decoder_inputs(causal, ids, images.by_key, always=True),
        position_ids=positions.to(ids.device),
        context=context,
        use_cache=False,
    ).last_hidden_state
