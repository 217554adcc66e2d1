"""Model of the commit protocol on an object store.

Granularity: one step = one store request plus the local work up to the next
request. Between any two steps every other process may run, so a pause of any
length before any request is covered. A request may be

    ok       applied, reply delivered
    applied  applied, reply lost
    dropped  not applied, reply lost (stands for 409 and 5xx too)
    ghost    reply lost, request still in flight: applied at any later time

Crash = loss of all volatile state. A process that never runs again is the
same as a pause, so every crash here restarts. Sweeps put their delete list in
`pend`; any of those deletes may be carried out at any later time, so `pend`
stands for any number of paused (zombie) collectors.

Reductions, and why they are sound:
  * tail() is one step. Slots are immutable and contiguous, so only its last
    request, the 404, says anything about time. Config `fine` drops this
    reduction and walks slot by slot from a hint that may be stale.
  * Reading the votes (and, in the variant with a merged manifest, writing it)
    is one step: votes do not change, and nobody else looks at a manifest that
    no record names. "Vote" is what the specification calls a part.
  * Config `merge`: an upload runs with the step before it (nobody looks at a
    shard that no vote names), and so does tail + make (what counts is the slot
    PUT that follows, which is a step of its own). Unmerged runs check the same.
  * Operator and collector records are appended in one step: an append that
    wins its slot is an atomic read-check-write of the whole log.
"""
from collections import namedtuple
from itertools import product

View = namedtuple("View", "gen epoch token seen resume anchor last_commit "
                          "last_step live bad local", defaults=(None,))
Rec = namedtuple("Rec", "kind uid prev gen args view")
Proc = namedtuple("Proc", "pc gen step rnd inc x")
State = namedtuple("State", "log acks objs dead pend ghosts procs gc budget kept",
                   defaults=((),))
Budget = namedtuple("Budget", "crash lost poison back restart lose torn unpoison",
                    defaults=(0, 0, 0))

Data = namedtuple("Data", "gen step rank who src", defaults=(None,))
Man = namedtuple("Man", "gen step who refs bases parts")
Vote = namedtuple("Vote", "gen step node base keys")

EMPTY = View(0, 0, None, (), 0, 0, 0, 0, (), ())

# The protocol as it stands in the specification. Each switch turned off gives
# back a rule of the hand-written draft (the last two: a valid variant).
FINAL = dict(
    fence_in_make=True,     # claim's fencing test runs inside make()
    rounds=True,            # claim token = (launch, round), equal token adopts
    adopt_vote=True,        # named votes: one left by an earlier self is adopted
    advance_any=True,       # every node commits any complete step, not its own
    anchor=True,            # dedup base = state.anchor, protected from RETIRE
    retire_good=True,       # K newest counts good commits only
    floor=True,             # a tail below what the process has seen is read again
    sticky=True,            # an EPOCH that steps back marks what it skipped
    unique_votes=True,      # every vote (part) has a name of its own
    parts=True,             # a COMMIT names the votes (parts); no merged manifest
)
# Mutations under which log slots get lost.
DELETES = ("delete_tail_slot", "delete_old_slot")


class Config:
    """Bounds and variants of one run."""

    def __init__(self, **kw):
        self.name = "unnamed"
        self.procs = (("A", 0, 2), ("A", 1, 2), ("B", 0, 1))
        self.warm = True            # start with EPOCH 1 of launch A in the log
        self.world = 2              # ranks
        self.steps = 2              # checkpoints per generation
        self.gens = 2
        self.keep = 1               # K
        self.crash = 1
        self.lost = 1
        self.poison = 0
        self.back = 0               # EPOCHs that step back
        self.restart = 0            # restarts of a group by the same launch
        self.gc = "one"             # None | batch | one | zombie (see run_rest)
        self.gc_split = False       # tail and LIST of a sweep are two steps
        self.merge = False          # upload and tail+make run with the step before
        self.fine = False           # tail() walks slot by slot from the hint
        self.stale = False          # tail() may return any earlier position
        self.commit_retires = False  # a COMMIT carries its RETIRE list
        self.retire_bad = False     # RETIRE may name bad commits (the operator's right)
        self.novotes = False        # one-node groups write no vote
        self.skip = True            # a node may drop a step for a newer one
        self.keys = "unique"        # unique | step-hash | content | reused
        self.mutation = None
        self.ignore = ()            # invariants left unchecked (consequence runs)
        self.strict = False         # count a second EPOCH of one token as an error
        self.liveness = True
        self.static = None          # ranks whose shard never changes
        self.any_static = False     # dedup chosen freely (walks only)
        # local resume, see local.py
        self.rule = "strict"        # strict, or a broken one: places | no_newer |
                                    # no_taint | by_number | by_step, see usable()
        self.offer = "any"          # any | newest complete set may be offered
        self.machines = None        # machine of each process (None: its own)
        self.slots = 2              # kept sets a machine has room for
        self.lose = 0               # kept sets that get lost
        self.torn = 0               # groups that die while they seal a set
        self.unpoison = 0
        self.foreign = False        # machine 0 holds a set of another life of the job
        self.__dict__.update(FINAL)
        for name, value in kw.items():
            if name not in self.__dict__:
                raise ValueError("unknown option " + name)
            self.__dict__[name] = value
        if self.static is None:
            self.static = (self.world - 1,)


class Table:
    """Interned values: value <-> small integer."""

    def __init__(self):
        self.of = {}
        self.all = []

    def id(self, value):
        n = self.of.get(value)
        if n is None:
            n = self.of[value] = len(self.all)
            self.all.append(value)
        return n


def bits(mask):
    """Indexes of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Model:
    """Transition system for one Config."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.recs = Table()
        self.recs.id(None)          # 0 is "no record"
        self.objs = Table()
        self.interned = {}
        self.name_mask = {}         # key name -> mask of the contents it had
        self.slot_votes = {}        # (gen, step) -> mask of its votes
        self.slot_mans = {}
        self.memo_garbage = {}
        self.memo_live = {}
        self.memo_solo = {}
        self.calm = False           # solo runs: no faults, fresh reads

    # ---------------------------------------------------------------- basics

    def obj(self, value):
        """Intern an object; returns its bit."""
        known = value in self.objs.of
        n = self.objs.id(value)
        bit = 1 << n
        if not known:
            name = self.key_name(value)
            self.name_mask[name] = self.name_mask.get(name, 0) | bit
            kind = type(value)
            if kind is Vote:
                at = (value.gen, value.step)
                self.slot_votes[at] = self.slot_votes.get(at, 0) | bit
            elif kind is Man:
                at = (value.gen, value.step)
                self.slot_mans[at] = self.slot_mans.get(at, 0) | bit
        return bit

    def key_name(self, value):
        if type(value) is Vote and not self.cfg.unique_votes:
            return ("vote", value.gen, value.step, value.node)
        if type(value) is Data and self.cfg.keys == "reused":
            return ("data", value.step, value.rank)
        return value

    def data_key(self, gen, step, rank, who):
        """Content identity of a fresh upload under the chosen key scheme."""
        if self.cfg.keys == "step-hash":
            return Data(gen, step, rank, None)
        if self.cfg.keys == "content":
            return Data(None, step, rank, None)
        return Data(gen, step, rank, who)

    def put(self, objs, value):
        """Create-if-absent, except under the overwriting mutations."""
        bit = self.obj(value)
        same = self.name_mask[self.key_name(value)]
        if objs & same and type(value) is Vote \
                and self.cfg.mutation != "vote_overwrite":
            return objs
        return (objs & ~same) | bit

    def proc(self, *fields):
        p = Proc(*fields)
        return self.interned.setdefault(p, p)

    def initial(self):
        cfg = self.cfg
        log = ()
        procs = []
        if cfg.warm:
            token = (cfg.procs[0][0], 1)
            args = self.epoch_args((), token, 0, ())
            view = self.apply(EMPTY, "EPOCH", args, 1)
            log = (self.recs.id(Rec("EPOCH", "init", 0, 1, args, view)),)
        for launch, node, _, *rnd in cfg.procs:
            if cfg.warm and launch == cfg.procs[0][0]:
                procs.append(self.proc("U", 1, 1, 1, 0, 1))
            else:
                rnd = rnd[0] if rnd else 1
                procs.append(self.proc("W" if node else "C", 0, 0, rnd, 0, None))
        return State(log, (), 0, 0, 0, (), tuple(procs), 0,
                     Budget(cfg.crash, cfg.lost, cfg.poison, cfg.back, cfg.restart))

    # ------------------------------------------------------------------- log

    def epoch_args(self, log, token, resume, skip, local=None):
        """Body of an EPOCH."""
        return (token, resume, skip)

    def apply(self, v, kind, args, seq):
        """The reducer: state after a record."""
        if kind == "EPOCH":
            token, resume, skip = args[:3]
            seen = v.seen if token[0] in v.seen else v.seen + (token[0],)
            bad = tuple(sorted(set(v.bad) | set(skip)))
            return v._replace(gen=v.gen + 1, epoch=seq, token=token, seen=seen,
                              resume=resume, anchor=resume, last_step=0, bad=bad)
        if kind == "COMMIT":
            gone = args[3]
            return v._replace(last_commit=seq, last_step=args[0],
                              live=tuple(c for c in v.live if c not in gone) + (seq,),
                              bad=tuple(c for c in v.bad if c not in gone),
                              anchor=v.anchor or seq)
        if kind == "RETIRE":
            return v._replace(live=tuple(c for c in v.live if c not in args),
                              bad=tuple(c for c in v.bad if c not in args))
        if kind == "POISON":
            return v._replace(bad=tuple(sorted(v.bad + args)))
        raise AssertionError(kind)

    def view(self, log, n=None):
        """View carried by the record in slot n (the tail by default)."""
        n = len(log) if n is None else n
        rid = log[n - 1] if n else 0
        return self.recs.all[rid].view if rid else EMPTY

    def good(self, v):
        return [c for c in v.live if c not in v.bad]

    def record(self, log, n, kind, uid, gen, args):
        """Build the record for slot n + 1 on top of slot n."""
        view = self.apply(self.view(log, n), kind, args, n + 1)
        return self.recs.id(Rec(kind, uid, log[n - 1] if n else 0, gen, args, view))

    def tails(self, st):
        """Positions that a tail() begun now may return."""
        log = st.log
        end = len(log)
        if self.cfg.mutation in DELETES:
            return (self.find_tail(st),)
        if self.cfg.stale and not self.calm:
            return tuple(range(end, 0, -1))
        return (end,)

    def find_tail(self, st):
        """tail() without a usable hint: bisection, then probe forward."""
        log = st.log

        def has(n):
            return 0 < n <= len(log) and log[n - 1] != 0
        low, high = 0, 1
        while has(high):
            low, high = high, high * 2
        while high - low > 1:
            mid = (low + high) // 2
            low, high = (mid, high) if has(mid) else (low, mid)
        while has(low + 1):
            low += 1
        return low

    # ------------------------------------------------------------- garbage

    def index(self, man):
        """Mask of the objects that describe a commit: its manifest or its parts."""
        mask = 0
        for n in self.objs.all[man].parts:
            mask |= 1 << n
        return mask or 1 << man

    def refs(self, v, log):
        """Mask of everything that the live commits refer to."""
        mask = 0
        for c in v.live:
            man = self.recs.all[log[c - 1]].args[1]
            mask |= self.index(man)
            for r in self.objs.all[man].refs:
                if r is not None:
                    mask |= 1 << r
        return mask

    def old(self, value, v):
        """The age rule, from the key's name and the tail's state alone."""
        if type(value) is Data and value.gen is None:      # content-addressed
            return True
        if self.cfg.mutation == "sweep_no_age":
            return True
        last = v.last_step + (1 if self.cfg.mutation == "sweep_next" else 0)
        return (value.gen, value.step) <= (v.gen, last)

    def garbage(self, log, mask):
        """Keys in mask that a sweep reading this log may delete."""
        at = (log, mask)
        found = self.memo_garbage.get(at)
        if found is None:
            v = self.view(log)
            keep = self.refs(v, log)
            if self.cfg.keys == "content":       # votes still in play count too
                for n in bits(mask):
                    value = self.objs.all[n]
                    if type(value) is Vote and value.gen == v.gen \
                            and value.step > v.last_step:
                        for _, k in value.keys:
                            keep |= 1 << k
            found = 0
            for n in bits(mask & ~keep):
                if self.old(self.objs.all[n], v):
                    found |= 1 << n
            if len(self.memo_garbage) > 1000000:
                self.memo_garbage.clear()
            self.memo_garbage[at] = found
        return found

    # ---------------------------------------------------------------- checks

    def double_ok(self, last, token):
        """Without rounds a restarted claimer may claim once more."""
        return not self.cfg.rounds and last == token and not self.cfg.strict

    def check_append(self, old, rid, objs):
        """Invariants that an appended record must meet."""
        rec = self.recs.all[rid]
        n = len(old)
        v = self.view(old)
        prev = old[-1] if n else 0
        if rec.prev != prev:
            return "I3: record does not follow the slot before it"
        if rec.view != self.apply(v, rec.kind, rec.args, n + 1):
            return "I3: carried state differs from the reduced log"
        if rec.kind == "EPOCH":
            token, resume, skip = rec.args[:3]
            if rec.gen != v.gen + 1:
                return "I4: EPOCH does not raise gen by one"
            if v.token and token[0] != v.token[0] and token[0] in v.seen:
                return "I5: an earlier launch claims again"
            if v.token and token[0] == v.token[0] and token[1] <= v.token[1] \
                    and not self.double_ok(v.token, token):
                return "I5: an earlier round of a launch claims after a later one"
            good = self.good(v)
            if resume and resume not in good:
                return "I14: resume_from is not live or not good"
            if good and not resume:
                return "I14: fresh start although a good commit is live"
            rest = [c for c in good if c not in skip]
            if resume != (rest[-1] if rest else 0) and self.cfg.sticky:
                return "I14: resume_from is not the newest good commit"
            for m in range(1, n + 1):
                e = self.recs.all[old[m - 1]]
                if e and e.kind == "EPOCH" and e.args[1] < resume < m \
                        and not self.pardoned(old, resume):
                    return "I18: a commit that an EPOCH stepped over is resumed"
            return None
        if rec.kind in ("RETIRE", "POISON"):
            if not set(rec.args) <= set(v.live):
                return "I18: record names a commit that is not live"
            if rec.kind == "RETIRE":
                if v.resume in rec.args or (self.cfg.anchor and v.anchor in rec.args):
                    return "I14: resume_from or anchor retired in its own generation"
                if self.good(v) and not self.good(rec.view):
                    return "I21: retention removed the last good commit"
            return None
        # COMMIT
        step, man, bases, gone = rec.args
        if {v.resume, v.anchor} & set(gone) - {0}:
            return "I14: COMMIT retires resume_from or the anchor"
        if rec.gen != v.gen:
            return "I6: COMMIT of gen %d after EPOCH of gen %d" % (rec.gen, v.gen)
        if step <= v.last_step:
            return "I11: step %d after step %d in one generation" % (step, v.last_step)
        if self.index(man) & ~objs:
            return "I7: manifest or part absent at commit"
        m = self.objs.all[man]
        if (m.gen, m.step) != (rec.gen, step):
            return "I7: manifest of another step"
        if None in m.refs or len(m.refs) != self.cfg.world:
            return "I7: a rank is missing"
        based = set()
        groups = {k.who[1] // 100 for k in (self.objs.all[r] for r in m.refs)
                  if k.who and (k.gen, k.step) == (rec.gen, step)}
        if len(groups) > 1:
            return "I7: shards of two process groups in one COMMIT"
        for b in bases:
            if b not in v.live:
                return "I10: base %d is not live where the COMMIT stands" % b
            based |= set(self.objs.all[self.recs.all[old[b - 1]].args[1]].refs)
        for rank, r in enumerate(m.refs):
            key = self.objs.all[r]
            if key.rank != rank:
                return "I7: shard of another rank"
            if not objs >> r & 1:
                return "I7: shard absent at commit"
            fresh = key.step == step and key.gen in (rec.gen, None)
            if not fresh and r not in based:
                return "I10: reference to a shard outside step and bases"
        return None

    def pardoned(self, log, c):
        """Whether an operator took a mark of this commit back."""
        recs = (self.recs.all[rid] for rid in log)
        return any(r and r.kind == "UNPOISON" and r.args == (c,) for r in recs)

    def check_live(self, log, objs):
        """I8: every live commit is whole."""
        at = (log, objs)
        if at not in self.memo_live:
            if len(self.memo_live) > 1000000:
                self.memo_live.clear()
            lost = self.refs(self.view(log), log) & ~objs
            self.memo_live[at] = "I8: live commit refers to %s, which is gone" % (
                self.objs.all[next(bits(lost))],) if lost else None
        return self.memo_live[at]

    def check_damaged(self, old, new):
        """Consequences of a lost slot, for runs that do not stop at I1."""
        if "I1" not in self.cfg.ignore:
            return "I1: an earlier part of the log changed"
        for n in range(len(new.log)):
            if new.log[n] and (n >= len(old.log) or new.log[n] != old.log[n]):
                if n + 1 < len(new.log):
                    return "I16: a record was appended below the tail"
        return None

    def check(self, old, new):
        """Invariants over one transition."""
        if new.log != old.log:
            if new.log[:len(old.log)] != old.log:
                return self.check_damaged(old, new)
            if set(new.acks) - set(new.log):
                return "I20: an acknowledged record is no longer in the log"
            if len(new.log) > len(old.log) + 1 or not new.log[-1]:
                return "I2: hole in the log"
            error = self.check_append(old.log, new.log[-1], new.objs)
            if error:
                return error
            ever = old.objs | old.dead
            back = self.garbage(old.log, ever) & ~self.garbage(new.log, ever)
            if back:
                return "I12: garbage %s came back to life" % (
                    self.objs.all[next(bits(back))],)
            return self.check_live(new.log, new.objs)
        if new.objs == old.objs:
            return None
        made = new.objs & ~old.objs
        again = made & old.dead
        if again and self.cfg.keys == "unique":
            for n in bits(again):
                if type(self.objs.all[n]) is not Vote:
                    return "I9: key created again"
        for n in bits(made):
            value = self.objs.all[n]
            if type(value) is Vote and not self.old(value, self.view(new.log)):
                same = self.name_mask[self.key_name(value)]
                if same & (old.objs | old.dead) & ~(1 << n):
                    return "I17: vote changed while it could still count"
        if old.objs & ~new.objs:
            return self.check_live(new.log, new.objs)
        return None

    # ----------------------------------------------------------- transitions

    def successors(self, st):
        """All (label, next state, error) of a state."""
        out = []
        for i in range(len(st.procs)):
            self.run_proc(st, i, out)
        self.run_rest(st, out)
        return out

    def emit(self, out, st, label, new):
        """Add one transition; normalise and check it."""
        if new.log is not st.log and new.ghosts:
            end = len(new.log)
            new = new._replace(ghosts=tuple(
                g for g in new.ghosts if g[0] != "log" or g[1] > end))
        error = self.check(st, new)
        if error is None and "  (I" in label:
            error = label[label.index("  (I") + 3:-1]
        if error and error.split(":")[0] in self.cfg.ignore:
            error = None
        out.append((label, new, error))

    def with_proc(self, st, i, p):
        procs = list(st.procs)
        procs[i] = p
        return tuple(procs)

    def votes(self, objs, gen, step):
        """Every way to cover each rank once with one vote per node, as
        (refs, bases, votes)."""
        nodes = {}
        for n in bits(objs & self.slot_votes.get((gen, step), 0)):
            nodes.setdefault(self.objs.all[n].node, []).append(n)
        ways = []
        for pick in product(*(nodes[node] for node in sorted(nodes))):
            refs = [None] * self.cfg.world
            bases = set()
            for n in pick:
                vote = self.objs.all[n]
                for rank, key in vote.keys:
                    refs[rank] = key
                if vote.base:
                    bases.add(vote.base)
            if None not in refs or (self.cfg.mutation == "partial_commit" and pick):
                ways.append((tuple(refs), tuple(sorted(bases)), pick))
        return ways

    def complete_steps(self, objs, gen, after):
        """Steps of a generation that can be committed, with their manifest."""
        found = []
        for step in range(after + 1, self.cfg.steps + 1):
            ways = self.votes(objs, gen, step)
            found.extend((step, got) for got in ways)
            if not ways and self.cfg.novotes:
                for n in bits(objs & self.slot_mans.get((gen, step), 0)):
                    found.append((step, n))
                    break
        return found

    def manifest(self, st, i, gen, step, got):
        """Objects after the manifest PUT, and the manifest's id. With parts the
        votes are the manifest: nothing is written, the Man is a mere name."""
        if isinstance(got, int):                # one-node group: already there
            return st.objs, got
        if self.cfg.parts:
            bit = self.obj(Man(gen, step, None, *got))
            return st.objs, bit.bit_length() - 1
        bit = self.obj(Man(gen, step, (i, st.procs[i].inc), got[0], got[1], ()))
        return st.objs | bit, bit.bit_length() - 1

    def claim_rule(self, v, launch, rnd):
        """ok | adopt | fenced, from the tail's state."""
        if self.cfg.mutation == "no_claim_fence":
            return "ok"
        if v.token and v.token[0] == launch:
            if not self.cfg.rounds:
                return "ok"
            if rnd == v.token[1]:
                return "adopt"
            return "ok" if rnd > v.token[1] else "fenced"
        return "fenced" if launch in v.seen else "ok"

    def base_for(self, st, p):
        """Commit whose shards this node may refer to instead of uploading."""
        v = self.view(st.log)
        epoch = self.recs.all[st.log[p.x - 1]] if 0 < p.x <= len(st.log) else None
        if epoch and epoch.kind != "EPOCH":
            epoch = None
        if self.cfg.anchor:
            # The anchor of the node's own generation, even if that is over.
            base = v.anchor if v.gen == p.gen else epoch.args[1] if epoch else 0
            return 0 if base in v.bad else base
        if v.gen == p.gen and v.last_step:
            return v.last_commit
        return epoch.args[1] if epoch else 0

    def goer(self, origin, st, i, out, head):
        """Callback that moves process i; follows merged steps to their end."""
        def go(label, *fields, **changes):
            p = self.proc(*fields)
            new = st._replace(procs=self.with_proc(st, i, p), **changes)
            if self.cfg.merge and not self.cfg.fine and p.pc in "TU":
                deeper = self.goer(origin, new, i, out, head + label + "; ")
                if p.pc == "U":
                    self.upload(new, i, deeper)
                else:
                    for n in self.tails(new):
                        self.make(new, i, n, deeper)
                return
            self.emit(out, origin, head + label, new)
        return go

    def run_proc(self, st, i, out):
        """Transitions of one supervisor."""
        cfg = self.cfg
        launch, node, nodes = cfg.procs[i][:3]
        p = st.procs[i]
        pc, gen, step, rnd, inc, x = p
        budget = st.budget
        who = "%s%d" % (launch, node) if cfg.procs[i][3:] in ((), (1,)) else \
            "%s%d(round %d)" % (launch, node, rnd)

        go = self.goer(st, st, i, out, who + ": ")

        # -- faults and out-of-band events
        if budget.crash and pc not in "XWZ":
            less = budget._replace(crash=budget.crash - 1)
            if self.claiming(p) and node:
                go("crash, restarts in restore", "R", gen, 0, rnd, inc + 1, x,
                   budget=less)
            elif self.claiming(p):
                go("crash, restarts in claim", "C", gen, 0, rnd, inc + 1, None,
                   budget=less)
            else:
                go("crash, restarts at step %d" % step, "U", gen, step, rnd,
                   inc + 1, self.epoch_of(p), budget=less)
        if budget.restart and node == 0 and (gen or pc == "X"):
            # inc // 100 numbers the process groups of a launch
            nxt = rnd if cfg.mutation == "same_token" else rnd + 1
            go("group restarts, round %d" % nxt, "C", gen, 0, nxt,
               (inc // 100 + 1) * 100, None,
               budget=budget._replace(restart=budget.restart - 1))
        if node:
            for j, other in enumerate(cfg.procs):
                q = st.procs[j]
                group = q.inc // 100 * 100
                if other[0] == launch and other[1] == 0 \
                        and (q.gen > gen or (q.gen == gen and group > inc)) \
                        and q.pc in "UVITPG" and not self.claiming(q):
                    go("joins gen %d" % q.gen, "R", q.gen, 0, rnd, max(inc, group),
                       self.epoch_of(q))

        # -- program
        if pc == "C":                                     # claim
            for n in self.tails(st):
                v = self.view(st.log, n)
                rule = self.claim_rule(v, launch, rnd)
                if rule == "fenced":
                    go("claim: fenced", "X", gen, 0, rnd, inc, None)
                    continue
                for s, got in self.complete_steps(st.objs, v.gen, v.last_step):
                    objs, man = self.manifest(st, i, v.gen, s, got)
                    go("helps gen %d step %d: reads its votes" % (v.gen, s),
                       "T", gen, s, rnd, inc, ("help", man, 0), objs=objs)
                for offer in self.offers(st, i):
                    go("claim: nothing (more) to help%s" % (
                        ", offers %d.%d" % offer[:2] if offer else ""),
                       "T", gen, 0, rnd, inc, ("epoch", 0, offer))
        elif pc == "T":                                   # tail() and make()
            if cfg.fine:
                self.fine_tail(st, i, go)
            else:
                for n in self.tails(st):
                    self.make(st, i, n, go)
        elif pc == "P":                                   # PUT slot
            self.put_slot(st, i, go)
        elif pc == "G":                                   # GET slot, unknown reply
            slot, rid = x[3], x[4]
            if cfg.mutation == "unknown_is_success":
                self.acked(st, i, slot, rid, go, "takes an unknown reply for success")
            elif slot <= len(st.log) and st.log[slot - 1]:
                if st.log[slot - 1] == rid and cfg.mutation != "no_uid":
                    self.acked(st, i, slot, rid, go, "reads back slot %d: own" % slot)
                else:
                    go("reads back slot %d: other" % slot, "T", gen, step, rnd, inc,
                       x[:3])
            else:
                go("reads back slot %d: absent" % slot, "P", gen, step, rnd, inc, x)
        elif pc == "R":                                   # restore
            self.restore(st, i, go)
        elif pc == "U":                                   # upload of a step
            self.upload(st, i, go)
        elif pc == "V":                                   # PUT vote
            self.put_vote(st, i, go)
            if cfg.skip and step < cfg.steps:
                go("drops step %d for a newer one" % step, "U", gen, step + 1, rnd,
                   inc, x[0])
        elif pc == "I":                                   # voted, training goes on
            v = self.view(st.log)
            dead = x[1]
            if v.gen == gen or cfg.mutation == "no_fence":
                for s, got in self.complete_steps(st.objs, gen, 0):
                    if s in dead or (v.gen == gen and s <= v.last_step
                                     and cfg.mutation != "no_step_rule"):
                        continue
                    if s != step and not cfg.advance_any:
                        continue
                    objs, man = self.manifest(st, i, gen, s, got)
                    go("commits step %d: reads its votes" % s, "T", gen,
                       step, rnd, inc, ("commit", man, x), objs=objs)
            if step < cfg.steps:
                go("goes on to step %d" % (step + 1), "U", gen, step + 1, rnd, inc,
                   x[0])

    def offers(self, st, i):
        """What a claimer may bring along: see local.py."""
        return (0,)

    def claiming(self, p):
        return p.pc in "CR" or (p.pc in "TPG" and p.x[0] in ("help", "epoch"))

    def epoch_of(self, p):
        """Slot of the EPOCH the process belongs to."""
        if p.pc in "UR":
            return p.x
        if p.pc == "V":
            return p.x[0]
        if p.pc == "I":
            return p.x[0]
        return p.x[2][0]                     # T, P, G of a commit

    def fine_tail(self, st, i, go):
        """tail() as single GETs. The hint may be lost, stale or overwritten by
        an older one, so the walk may begin anywhere at or below the tail.
        x[3] = position, x[4] = length of the log when the walk began."""
        p = st.procs[i]
        x = p.x
        end = len(st.log)
        if len(x) == 3:
            for n in range(end + 1):
                go("tail: begins at slot %d" % n, *p._replace(x=x + (n, end)))
            return
        n, began = x[3], x[4]
        if n < end and self.cfg.mutation != "trust_hint":
            go("tail: slot %d is there" % (n + 1), *p._replace(x=x[:3] + (n + 1, began)))
            return
        if n < began:
            go("tail: returns %d  (I16: slot %d was there before it began)" % (n, began),
               "!", *p[1:])
            return
        q = st._replace(procs=self.with_proc(st, i, self.proc(*p._replace(x=x[:3]))))
        self.make(q, i, n, go)

    def make(self, st, i, n, go):
        """make(): validate against the state of slot n, build the record."""
        cfg = self.cfg
        launch = cfg.procs[i][0]
        pc, gen, step, rnd, inc, x = st.procs[i]
        purpose, man = x[0], x[1]
        v = self.view(st.log, n)
        uid = (i, inc)
        if purpose == "epoch":
            if cfg.fence_in_make:
                rule = self.claim_rule(v, launch, rnd)
                if rule == "fenced":
                    go("make EPOCH: fenced", "X", gen, 0, rnd, inc, None)
                    return
                if rule == "adopt":
                    go("make EPOCH: own token at the tail, adopts gen %d" % v.gen, "R",
                       v.gen, 0, rnd, inc, v.epoch)
                    return
            if v.gen >= cfg.gens:
                go("make EPOCH: bound reached", "X", gen, 0, rnd, inc, None)
                return
            good = self.good(v)
            options = [(good[-1] if good else 0, (), st.budget)]
            if st.budget.back and len(good) > 1:
                skip = (good[-1],) if cfg.sticky else ()
                options.append((good[-2], skip,
                                st.budget._replace(back=st.budget.back - 1)))
            if cfg.mutation == "resume_outside_make":
                options = [(x[2], (), st.budget)] if x[2] else options
                if not x[2] and good:
                    go("picks resume_from %d before append" % good[-1], "T", gen, 0,
                       rnd, inc, ("epoch", 0, good[-1]))
                    return
            for resume, skip, budget in options:
                rid = self.record(st.log, n, "EPOCH", uid, v.gen + 1,
                                  ((launch, rnd), resume, skip))
                go("make EPOCH gen %d resume %d for slot %d" % (v.gen + 1, resume, n + 1),
                   "P", gen, 0, rnd, inc, x[:3] + (n + 1, rid), budget=budget)
            return
        m = self.objs.all[man]
        if cfg.floor and (v.gen < m.gen or max(m.bases + (0,)) > n):
            return                  # older than what the process has seen: reads again
        if v.gen != m.gen and cfg.mutation != "no_fence":
            if purpose == "help":
                go("make COMMIT: generation is over", "C", gen, 0, rnd, inc, None)
            elif self.view(st.log).gen == m.gen:
                go("make COMMIT: fenced  (I19: its generation is current)", "!", gen, step,
                   rnd, inc, None)
            else:
                go("make COMMIT: fenced", "X", gen, step, rnd, inc, None)
            return
        if m.step <= v.last_step and cfg.mutation != "no_step_rule":
            self.after(st, i, go, "make COMMIT: step is covered already")
            return
        if not set(m.bases) <= set(v.live) and cfg.mutation != "no_base_check":
            self.after(st, i, go, "make COMMIT: base retired", dead=m.step)
            return
        args = (m.step, man, m.bases, ())
        if cfg.commit_retires:
            args = args[:3] + (tuple(self.retirable(self.apply(v, "COMMIT", args, n + 1))),)
        rid = self.record(st.log, n, "COMMIT", uid, m.gen, args)
        go("make COMMIT gen %d step %d for slot %d" % (m.gen, m.step, n + 1), "P", gen,
           step, rnd, inc, x[:3] + (n + 1, rid))

    def after(self, st, i, go, label, dead=None, **changes):
        """Where a COMMIT attempt goes when it is over."""
        pc, gen, step, rnd, inc, x = st.procs[i]
        if x[0] == "help":
            go(label, "C" if dead is None else "T", gen, 0, rnd, inc,
               None if dead is None else ("epoch", 0, 0), **changes)
        else:
            was = x[2]
            if dead is not None:
                was = (was[0], tuple(sorted(set(was[1]) | {dead})))
            go(label, "I", gen, step, rnd, inc, was, **changes)

    def acked(self, st, i, slot, rid, go, label, **changes):
        """The append counts as done for this process."""
        pc, gen, step, rnd, inc, x = st.procs[i]
        log = changes.get("log", st.log)
        if slot > len(log) or log[slot - 1] != rid:
            go(label + "  (I20: acknowledged, but the log says otherwise)", "!", gen,
               step, rnd, inc, None, **changes)
            return
        if x[0] == "epoch":
            go(label, "R", self.recs.all[rid].gen, 0, rnd, inc, slot, **changes)
        else:
            self.after(st, i, go, label, **changes)

    def put_slot(self, st, i, go):
        """One PUT If-None-Match on a log slot."""
        cfg = self.cfg
        pc, gen, step, rnd, inc, x = st.procs[i]
        slot, rid = x[3], x[4]
        budget = st.budget
        what = self.recs.all[rid].kind + " at slot %d" % slot
        free = slot > len(st.log) or not st.log[slot - 1]
        if cfg.mutation == "store_overwrites":
            free = True
        if free:
            log = st.log[:slot - 1] + (rid,) + st.log[slot:]
            acks = st.acks + (rid,) if cfg.mutation in DELETES else ()
            self.acked(st, i, slot, rid, go, "PUT %s: ok" % what, log=log, acks=acks)
        elif st.log[slot - 1] == rid and cfg.mutation != "no_uid":
            self.acked(st, i, slot, rid, go, "PUT %s: 412, own record" % what)
        elif cfg.mutation == "412_is_success":
            self.acked(st, i, slot, rid, go, "PUT %s: 412, taken for success" % what)
        else:
            go("PUT %s: 412, other record" % what, "T", gen, step, rnd, inc, x[:3])
        if budget.lost:
            less = budget._replace(lost=budget.lost - 1)
            if free:
                go("PUT %s: applied, reply lost" % what, "G", gen, step, rnd, inc, x,
                   log=st.log[:slot - 1] + (rid,) + st.log[slot:], budget=less)
            go("PUT %s: dropped or 409" % what, "G", gen, step, rnd, inc, x, budget=less)
            ghost = ("log", slot, rid)
            if free and ghost not in st.ghosts:
                go("PUT %s: in flight, no reply" % what, "G", gen, step, rnd, inc, x,
                   ghosts=tuple(sorted(st.ghosts + (ghost,))), budget=less)

    def restore(self, st, i, go):
        """Read the commit that the generation's EPOCH names."""
        cfg = self.cfg
        pc, gen, step, rnd, inc, x = st.procs[i]
        epoch = self.recs.all[st.log[x - 1]] if x <= len(st.log) else None
        if epoch is None or epoch.kind != "EPOCH":       # only if slots get lost
            go("restore: its EPOCH is gone", "X", gen, 0, rnd, inc, None)
            return
        resume = epoch.args[1]
        v = self.view(st.log)
        mine = resume
        if cfg.mutation == "newest_per_node":
            good = self.good(v)
            mine = good[-1] if good else 0
        if mine != resume:
            go("restores commit %d  (I15: the EPOCH says %d)" % (mine, resume), "!", gen,
               0, rnd, inc, None)
            return
        if mine:
            man = self.recs.all[st.log[mine - 1]].args[1]
            need = self.index(man)
            for r in self.objs.all[man].refs:
                need |= 1 << r
            if need & ~st.objs:
                if v.epoch == x:
                    go("restores commit %d  (I8: objects missing)" % mine, "!", gen, 0,
                       rnd, inc, None)
                else:
                    go("restore: objects gone, generation is over", "X", gen, 0, rnd, inc,
                       None)
                return
        go("restores commit %d" % mine, "U", gen, 1, rnd, inc, x)

    def upload(self, st, i, go):
        """Upload own shards of a step, or refer to the base's."""
        cfg = self.cfg
        _, node, nodes = cfg.procs[i][:3]
        pc, gen, step, rnd, inc, x = st.procs[i]
        base = self.base_for(st, st.procs[i])
        old = None
        if base:
            man = self.objs.all[self.recs.all[st.log[base - 1]].args[1]]
            old = man.refs
        ranks = [r for r in range(cfg.world) if r * nodes // cfg.world == node]
        choices = [cfg.static]
        if cfg.any_static:
            choices = [(), tuple(ranks)]
        for static in choices:
            objs = st.objs
            keys = []
            used = 0
            for r in ranks:
                if old is not None and r in static and old[r] is not None:
                    keys.append((r, old[r]))
                    used = base
                else:
                    value = self.data_key(gen, step, r, (i, inc))
                    objs = self.put(objs, value)
                    keys.append((r, self.objs.of[value]))
            if cfg.novotes and nodes == 1:
                refs = tuple(k for _, k in keys)
                bases = (used,) if used else ()
                bit = self.obj(Man(gen, step, (i, inc), refs, bases, ()))
                go("uploads step %d, puts manifest (no vote)" % step, "T", gen, step, rnd,
                   inc, ("commit", bit.bit_length() - 1, (x, ())), objs=objs | bit)
                continue
            vote = Vote(gen, step, node, used, tuple(keys))
            go("uploads step %d, base %d" % (step, used), "V", gen, step, rnd, inc,
               (x, self.obj(vote).bit_length() - 1), objs=objs)

    def put_vote(self, st, i, go):
        """PUT of the vote; without unique names If-None-Match and adoption."""
        cfg = self.cfg
        pc, gen, step, rnd, inc, x = st.procs[i]
        epoch, vid = x
        vote = self.objs.all[vid]
        there = st.objs & self.name_mask[self.key_name(vote)]
        budget = st.budget
        done = ("I", gen, step, rnd, inc, (epoch, ()))
        if not there or cfg.mutation == "vote_overwrite":
            go("PUT vote step %d: ok" % step, *done, objs=self.put(st.objs, vote))
        elif there >> vid & 1:
            go("PUT vote step %d: 412, same content" % step, *done)
        elif cfg.adopt_vote:
            go("PUT vote step %d: 412, adopts the earlier vote" % step, *done)
        elif step < cfg.steps:
            go("PUT vote step %d: 412, other content, gives the step up" % step, "U", gen,
               step + 1, rnd, inc, epoch)
        else:
            go("PUT vote step %d: 412, other content, gives up" % step, "X", gen, step,
               rnd, inc, None)
        if budget.lost and not there:
            less = budget._replace(lost=budget.lost - 1)
            go("PUT vote step %d: applied, reply lost" % step, *st.procs[i],
               objs=self.put(st.objs, vote), budget=less)
            ghost = ("vote", vid, 0)
            if ghost not in st.ghosts:
                go("PUT vote step %d: in flight, no reply" % step, *st.procs[i],
                   ghosts=tuple(sorted(st.ghosts + (ghost,))), budget=less)

    def run_rest(self, st, out):
        """Ghost requests, collector, operator."""
        cfg = self.cfg
        log, objs = st.log, st.objs
        end = len(log)
        for g in st.ghosts:
            rest = tuple(h for h in st.ghosts if h != g)
            if g[0] == "log":
                if g[1] == end + 1 or (g[1] <= end and not log[g[1] - 1]):
                    later = log[:g[1] - 1] + (g[2],) + log[g[1]:]
                    self.emit(out, st, "late PUT lands at slot %d" % g[1],
                              st._replace(log=later, ghosts=rest))
            else:
                self.emit(out, st, "late vote PUT lands", st._replace(
                    objs=self.put(objs, self.objs.all[g[1]]), ghosts=rest))
        v = self.view(log)
        if cfg.gc:
            for c in () if cfg.commit_retires else self.retirable(v):
                rid = self.record(log, end, "RETIRE", "gc", v.gen, (c,))
                self.emit(out, st, "gc: RETIRE %d" % c, st._replace(log=log + (rid,)))
            self.sweep(st, out)
            if st.pend and cfg.gc == "batch":
                gone = 0
                for n in bits(st.pend):
                    gone |= self.name_mask[self.key_name(self.objs.all[n])] & objs
                self.emit(out, st, "gc: deletes its list", st._replace(
                    objs=objs & ~gone, dead=st.dead | gone, pend=0))
            elif st.pend:
                low = st.pend & -st.pend
                name = self.key_name(self.objs.all[low.bit_length() - 1])
                gone = self.name_mask[name] & objs
                self.emit(out, st, "gc: deletes %s" % (name,), st._replace(
                    objs=objs & ~gone, dead=st.dead | gone, pend=st.pend & ~low))
        if st.budget.poison:
            less = st.budget._replace(poison=st.budget.poison - 1)
            for c in self.good(v):
                rid = self.record(log, end, "POISON", "op", v.gen, (c,))
                self.emit(out, st, "operator: POISON %d" % c,
                          st._replace(log=log + (rid,), budget=less))
        if cfg.mutation == "delete_tail_slot" and end > 1 and log[-1]:
            self.emit(out, st, "bucket rule deletes slot %d" % end,
                      st._replace(log=log[:-1]))
        if cfg.mutation == "delete_old_slot" and end > 2 and log[0]:
            self.emit(out, st, "bucket rule deletes slot 1",
                      st._replace(log=(0,) + log[1:]))

    def retirable(self, v):
        """Commits that a RETIRE may name."""
        cfg = self.cfg
        newest = self.good(v) if cfg.retire_good else list(v.live)
        keep = set(newest[-cfg.keep:]) | {v.last_commit}
        if not cfg.retire_bad:
            keep |= set(v.bad)
        if cfg.mutation != "retire_resume":
            keep.add(v.resume)
        if cfg.anchor and cfg.mutation != "retire_resume":
            keep.add(v.anchor)
        return [c for c in v.live if c not in keep]

    def sweep(self, st, out):
        """Sweep: tail, live manifests, LIST, then the delete list."""
        cfg = self.cfg
        if st.pend and cfg.gc != "zombie":
            return
        if cfg.gc_split and not st.gc:
            for n in self.tails(st):
                self.emit(out, st, "gc: sweep reads tail %d" % n, st._replace(gc=n))
            return
        for n in ((st.gc,) if cfg.gc_split else self.tails(st)):
            log = st.log[:n]
            v = self.view(log)
            whole = True
            for c in v.live:
                if self.index(self.recs.all[log[c - 1]].args[1]) & ~st.objs:
                    whole = False
            found = 0
            if whole:
                found = self.garbage(log, st.objs)
                if cfg.mutation == "partial_list" and v.live:
                    short = v._replace(live=v.live[1:])
                    keep = self.refs(short, log)
                    found = sum(1 << k for k in bits(st.objs & ~keep)
                                if self.old(self.objs.all[k], v))
            if found & ~st.pend or cfg.gc_split:
                now = self.garbage(st.log, st.objs)
                before = len(out)
                self.emit(out, st, "gc: sweep lists %d keys" % bin(found).count("1"),
                          st._replace(pend=st.pend | found, gc=0))
                if found & ~now and "I13" not in cfg.ignore:
                    label, new, error = out[before]
                    out[before] = (label, new, error or "I13: sweep would delete %s, "
                                   "which is no garbage" %
                                   (self.objs.all[next(bits(found & ~now))],))

    # -------------------------------------------------------------- liveness

    def liveness(self, st):
        """L1 and L2, by solo runs from this very state."""
        if not self.cfg.liveness:
            return None
        v = self.view(st.log)
        top = max([0] + [s for s, _ in self.complete_steps(st.objs, v.gen, v.last_step)])
        for i, p in enumerate(st.procs):
            if top and p.gen == v.gen and p.pc in "UVITPG" and not self.claiming(p):
                if not self.solo(st, i, v.gen, top):
                    return ("L1: all ranks voted for gen %d step %d, but process %d "
                            "alone never commits it" % (v.gen, top, i))
            if self.claiming(p) and not self.solo(st, i, None, None):
                return "L2: process %d alone never gets through claim and restore" % i
        return None

    def solo(self, st, i, gen, step):
        """Run one process alone, without faults, until it has made progress."""
        at = (st.log, st.objs, st.procs[i], i, gen, step, st.kept)
        if at in self.memo_solo:
            return self.memo_solo[at]
        if len(self.memo_solo) > 1000000:
            self.memo_solo.clear()
        calm = st._replace(budget=Budget(0, 0, 0, 0, 0), ghosts=(), pend=0)
        ok = False
        self.calm = True
        for _ in range(60):
            v = self.view(calm.log)
            p = calm.procs[i]
            if gen is not None and (v.gen != gen or v.last_step >= step):
                ok = True
                break
            if gen is None and not self.claiming(p):
                ok = p.pc != "!"
                break
            out = []
            self.run_proc(calm, i, out)
            out = [o for o in out if "drops step" not in o[0] and "joins" not in o[0]
                   and "a member is gone" not in o[0]]
            if not out:
                break
            pick = [o for o in out if "commits step" in o[0]] or out
            calm = pick[-1][1]
        self.calm = False
        self.memo_solo[at] = ok
        return ok

    # ---------------------------------------------------------- random walks

    def random_step(self, st, rng):
        """One step of a random process; faults and idle sweeps are thinned out.
        None when no process has anything left to do."""
        rest = []
        self.run_rest(st, rest)
        order = list(range(len(st.procs)))
        for _ in range(100):
            out = rest
            if not rest or rng.random() < 0.85:
                rng.shuffle(order)
                for k in order:
                    out = []
                    self.run_proc(st, k, out)
                    if out:
                        break
                else:
                    return None
            pick = out[rng.randrange(len(out))]
            skip = [odds for word, odds in self.THIN if word in pick[0]]
            if not skip or rng.random() > max(skip):
                return pick
        return pick

    THIN = (("crash", 0.8), ("lost", 0.7), ("in flight", 0.7), ("dropped", 0.7),
            ("group restarts", 0.9), ("POISON", 0.97), ("drops step", 0.7),
            ("claim: nothing", 0.8), ("sweep", 0.5))
