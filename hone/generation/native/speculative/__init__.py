"""Speculative decoding: several drafted tokens of a row are verified in one forward pass.

A drafter proposes the next tokens of a row. One pass computes the logits after its last token and after every draft. Each
position is then sampled with the draw that ordinary decoding uses there. Drafts are kept while they equal the sampled tokens; the
first sampled token that differs is kept in place of its draft, and the cache entries after it are overwritten later.

So tokens and log-probs are those of decoding without drafts, whatever the drafter proposes. Only rounding differs, because a
matmul has another shape.
"""

from hone.generation.native.speculative.drafts import Drafter, DraftRow, Speculation

__all__ = ["DraftRow", "Drafter", "Speculation"]
