"""Clusters that read the same keys stay near one another: one reads a key tile from memory, the others find it in the L2 cache.

Of split rows a key tile is 128 KB, so the cache holds some 200 of them. The clusters that run at once start together and drift
apart over the items that they take one after another. In a long context they then read from memory each for itself, many times
the bytes, which costs power, and so the card's clock.

Every STEP key tiles a running cluster publishes how far it is, and waits while one with the same keys is more than SLACK steps
behind, though by no more than half of its own item. Progress is the turn, then the steps done of the item. A turn is the number
of the launch over the clusters that run at once; an item of the turn before is taken to have as many steps as the own one.

No result depends on it, and no wait is without end: a cluster looks PATIENCE times for each step of its item, which takes it
half as long as the item, and then withdraws its word and keeps pace with no other for the rest of that item.

Nor should it come to that. A cluster waits for less progress than its own alone, and whoever wrote a word that is not 0 last is
running: it has not left. So the one with the least waits for none, whatever else runs. The words are those of a kernel on a
device, in a process, one for two SMs, and 0 where no cluster runs that publishes: a launch leaves none behind for the next or
for a graph's replay. Launches of several streams share them; where two clusters write the same word, others miss one of them,
and the last to leave it leaves 0. Where fewer clusters run at once than the launch counts on, beside other kernels or under a
limit on SMs, items of one turn run one after another: most are then further apart than half an item, and wait for nothing.
"""

from typing import Any

import tilelang.language as T

from codegen.kernels.common import INT32

STEP = 16  # key tiles
SLACK = 4  # steps
PATIENCE = 16  # times a step of its item that a cluster looks, a microsecond each, before it goes on without
SHORTEST = 256  # key tiles: fewer stay in the cache whatever the clusters do
TURNS, KEYS_READ = 127, 4096  # modulo which turns and what is read are told apart

# In front of the kernel's text, after TileLang's headers.
PRELUDE = (
    r"""
namespace tl {

// The progress of the clusters that run: turn << 24 | what it reads << 12 | steps done + 1.
static __device__ uint4 paces[32];

// By a warp.
TL_DEVICE void publish_pace(unsigned word) {
  unsigned sm, lane;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  unsigned *const place = reinterpret_cast<unsigned *>(paces) + sm / 2 % 128;
  if (lane == 0) asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(word) : "memory");
}

TL_DEVICE bool far_behind(unsigned word, unsigned other, int steps) {
  if ((word ^ other) >> 12 & 4095) return false;  // reads something else
  const int turns = int(word >> 24) - int(other >> 24);
  const int lag = int(word & 4095) - int(other & 4095) + (turns == 0 ? 0 : steps);
  return other != 0 && (turns == 0 || turns == 1) && lag > """
    + str(SLACK)
    + r""" && lag <= steps / 2;
}

// By a warp, `done` steps into an item of `steps`; place: the upper bits of the cluster's word, or 0. Returns the place, or 0
// where it has waited in vain.
TL_DEVICE int keep_pace(int place, int done, int steps) {
  if (place == 0) return 0;
  const unsigned word = place | ::min(done + 1, 4095);
  publish_pace(word);
  unsigned lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  for (int polls = steps * """
    + str(PATIENCE)
    + r"""; polls > 0; --polls) {
    unsigned a, b, c, d;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "l"(paces + lane)
                 : "memory");
    const bool wait = far_behind(word, a, steps) || far_behind(word, b, steps) || far_behind(word, c, steps) ||
                      far_behind(word, d, steps);
    if (!__any_sync(0xffffffffu, wait)) return place;
    __nanosleep(200);
  }
  publish_pace(0);
  return 0;
}

TL_DEVICE void leave_pace(int place) {
  if (place != 0) publish_pace(0);
}

}  // namespace tl
"""
)


@T.macro
def keep_pace(place: T.Ref, tile, tiles):
    """By the warp that loads key tile `tile` of `tiles`, before it does."""
    if tile % STEP == 0:
        place = T.call_extern(INT32, "tl::keep_pace", place, tile // STEP, tiles // STEP)


@T.macro
def leave_pace(place):
    """By the same warp, after the last."""
    T.evaluate(T.call_extern("handle", "tl::leave_pace", place))


def place_of(turn: Any, reads: Any, tiles: Any, takes_part: Any) -> Any:
    """The place of a CTA, which is 0 but in a cluster's first. turn: of its item. reads: a number for the keys it reads."""
    return T.if_then_else(
        T.And(takes_part, tiles >= SHORTEST),
        (turn % TURNS + 1) * (1 << 24) + reads % KEYS_READ * (1 << 12),
        0,
    )
