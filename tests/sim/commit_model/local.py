"""Local resume: the next process group may restore images that its nodes still hold.

What is added to protocol.py
  * Steps are counted through the job: a generation goes on after the step that it
    restored, and last_step of an EPOCH is the step of its resume commit.
  * A machine keeps the sets its node sealed (`kept`, the newest `slots` of them). Trainers
    that crash and supervisors that crash leave them; `lose` drops one at any time.
  * node 0 gathers the inventory when it has nothing (more) to help, and offers any set, or
    none, of which the nodes of its group hold every rank. So the offer may be stale when the
    EPOCH is made, and need not be the newest: what make() accepts has to be right anyway.
  * make() puts the offer into the EPOCH if `usable`. A node without the set ends the group
    (Z), and node 0 claims again in the next round, where that set cannot be complete.
  * The restored set is uploaded again, under fresh keys, as the first step.

Every shard carries `src`, the (gen, step, group) that computed its content. No rule looks at
it; the invariants do.

Invariants, besides all of protocol.py
  I7   shards of a COMMIT were computed by its own process group at that very step, except
       those of the set that the generation restored: then all are of that set
  I14  a local set is newer than the resume commit and descends from it: its newest committed
       ancestor is the resume commit
  I15  every rank restores what the EPOCH names: the local set, else the commit
  I18  neither the newest committed ancestor of a local set nor a commit of the same content
       is bad, has been retired as a bad one, or was skipped
  I22  a local set is of a generation of this very log, and whole
"""
from collections import namedtuple

from protocol import Model, Rec, Vote

# What a machine keeps. epoch: the EPOCH record under which it was sealed (its identity).
Set = namedtuple("Set", "gen step epoch src whole")


class LocalModel(Model):
    """Transition system with local resume."""

    # ---------------------------------------------------------------- basics

    def initial(self):
        st = super().initial()
        self.home = self.cfg.machines or tuple(range(len(self.cfg.procs)))
        kept = [()] * (max(self.home) + 1)
        if self.cfg.foreign:
            other = self.recs.id(Rec("EPOCH", "other life", 0, 1, (), None))
            kept[0] = (Set(1, self.cfg.steps, other, (0, self.cfg.steps, ("?", 0)), True),)
        cfg = self.cfg
        return st._replace(kept=tuple(kept), budget=st.budget._replace(
            lose=cfg.lose, torn=cfg.torn, unpoison=cfg.unpoison))

    def epoch_args(self, log, token, resume, skip, local=None):
        last = self.recs.all[log[resume - 1]].args[0] if resume else 0
        return (token, resume, skip, local, last)

    def apply(self, v, kind, args, seq):
        if kind == "UNPOISON":
            return v._replace(bad=tuple(c for c in v.bad if c not in args))
        new = super().apply(v, kind, args, seq)
        if kind == "EPOCH":
            new = new._replace(local=args[3], last_step=args[4])
        return new

    def place(self, log, c):
        """(gen, step) of a commit."""
        rec = self.recs.all[log[c - 1]] if c else None
        return (rec.gen, rec.args[0]) if rec else (0, 0)

    def group(self, i, inc):
        """Process group of a node."""
        return (self.cfg.procs[i][0], inc // 100)

    def keep(self, st, i, new):
        """Sets of all machines after this one sealed or labelled a set."""
        kept = list(st.kept)
        mine = set(kept[self.home[i]]) | {new}
        kept[self.home[i]] = tuple(sorted(mine)[-self.cfg.slots:])
        return tuple(kept)

    def find(self, st, i, local):
        """This machine's copy of a set, whole or not."""
        for s in st.kept[self.home[i]]:
            if s[:3] == local[:3]:
                return s
        return None

    # ------------------------------------------------------------- the rule

    def offers(self, st, i):
        """Nothing, or a set that the nodes of this group hold completely."""
        cfg = self.cfg
        launch = cfg.procs[i][0]
        members = [j for j, p in enumerate(cfg.procs) if p[0] == launch]
        found = [0]
        for s in st.kept[self.home[i]]:
            copies = [self.find(st, j, s) for j in members]
            if cfg.mutation == "partial" or (None not in copies and (
                    cfg.mutation == "unverified" or all(c.whole for c in copies))):
                found.append(s)
        return found if cfg.offer == "any" else found[:1] + found[1:][-1:]

    def usable(self, log, n, offer, resume, skip):
        """make(): whether the EPOCH on top of slot n names the offered set."""
        rule = self.cfg.rule
        v = self.view(log, n)
        if rule == "places":            # by (gen, step) and the live bad commits
            oldest, mine = self.place(log, resume), offer[:2]
            taint = [c for c in v.bad if oldest < self.place(log, c) <= mine]
            return not (skip or mine <= oldest or offer.gen > v.gen or taint)
        committed = v.last_commit > v.epoch
        nearest = v.last_commit if committed else v.resume
        ours = v.epoch and offer.epoch == log[v.epoch - 1]
        if rule == "by_number":
            ours = offer.gen == v.gen
        elif rule == "by_step":
            ours = True
        if rule != "no_taint" and (skip or resume != nearest):
            return False
        if rule == "no_newer":
            return True
        if ours and offer.step > v.last_step:
            return True
        return not committed and v.local is not None and v.local[:3] == offer[:3]

    def make(self, st, i, n, go):
        cfg = self.cfg
        launch = cfg.procs[i][0]
        pc, gen, step, rnd, inc, x = st.procs[i]
        if x[0] != "epoch":
            super().make(st, i, n, go)
            return
        v = self.view(st.log, n)
        rule = self.claim_rule(v, launch, rnd)
        if rule == "fenced":
            go("make EPOCH: fenced", "X", gen, 0, rnd, inc, None)
            return
        if rule == "adopt":
            go("make EPOCH: own token at the tail, adopts gen %d" % v.gen, "R",
               v.gen, 0, rnd, inc, v.epoch)
            return
        good = self.good(v)
        if v.gen >= cfg.gens or (v.live and not good):
            go("make EPOCH: bound reached or no good commit", "X", gen, 0, rnd, inc, None)
            return
        options = [(good[-1] if good else 0, (), st.budget)]
        if st.budget.back and len(good) > 1:
            options.append((good[-2], (good[-1],),
                            st.budget._replace(back=st.budget.back - 1)))
        offer = x[2]
        if cfg.mutation == "outside_make" and offer and len(offer) == len(Set._fields):
            options = options[:1]
            ok = self.usable(st.log, n, offer, *options[0][:2])
            go("decides on the local set before append", "T", gen, 0, rnd, inc,
               ("epoch", 0, (offer if ok else None,)))
            return
        for resume, skip, budget in options:
            local = None
            if cfg.mutation == "outside_make" and offer:
                local = offer[0]
            elif offer and self.usable(st.log, n, offer, resume, skip):
                local = offer
            rid = self.record(st.log, n, "EPOCH", (i, inc), v.gen + 1, self.epoch_args(
                st.log, (launch, rnd), resume, skip, tuple(local[:4]) if local else None))
            go("make EPOCH gen %d resume %d local %s for slot %d" % (
                v.gen + 1, resume, "%d.%d" % local[:2] if local else "-", n + 1),
               "P", gen, 0, rnd, inc, x[:3] + (n + 1, rid), budget=budget)

    # --------------------------------------------------------------- restore

    def restore(self, st, i, go):
        cfg = self.cfg
        pc, gen, step, rnd, inc, x = st.procs[i]
        epoch = self.recs.all[st.log[x - 1]]
        resume, local = epoch.args[1], epoch.args[3]
        if cfg.mutation == "per_node":
            mine = [s for s in st.kept[self.home[i]] if s.whole
                    and s[:2] > self.place(st.log, resume)]
            local = tuple(mine[-1][:4]) if mine else None
        if cfg.mutation == "partial" and local and not self.find(st, i, local):
            local = None
        if local != epoch.args[3]:
            go("restores %s  (I15: the EPOCH says %s)" % (local, epoch.args[3]), "!", gen,
               0, rnd, inc, None)
            return
        if local is None:
            def after(label, *fields, **changes):
                pc, gen, step, rnd, inc, x = fields
                if pc == "U":
                    step = epoch.args[4] + 1
                    if step > cfg.steps:
                        pc, x = "X", None
                go(label, pc, gen, step, rnd, inc, x, **changes)
            super().restore(st, i, after)
            return
        mine = self.find(st, i, local)
        if mine is None:
            self.give_up(st, i, go, "restore: local set %d.%d is lost" % local[:2])
        elif not mine.whole:
            go("restores local set %d.%d  (I22: it is not whole)" % local[:2], "!", gen, 0,
               rnd, inc, None)
        elif mine.src != local[3]:
            go("restores local set %d.%d  (I15: of another process group)" % local[:2],
               "!", gen, 0, rnd, inc, None)
        else:
            go("restores local set %d.%d" % local[:2], "U", gen, local[1], rnd, inc, x)

    def give_up(self, st, i, go, label, **changes):
        """This node ends its group: node 0 claims again, another node waits for that."""
        pc, gen, step, rnd, inc, x = st.procs[i]
        if self.cfg.procs[i][1]:
            go(label + ", group ends", "Z", gen, 0, rnd, inc, None, **changes)
        else:
            go(label + ", next round", "C", gen, 0, rnd + 1, (inc // 100 + 1) * 100, None,
               **changes)

    # ---------------------------------------------------------------- upload

    def sealed(self, st, i):
        """The set a node has at its step: trained, or restored and to be flushed again."""
        pc, gen, step, rnd, inc, x = st.procs[i]
        rid = st.log[x - 1]
        local = self.recs.all[rid].args[3]
        new = Set(gen, step, rid, (gen, step, self.group(i, inc)), True)
        if local is None or step != local[1]:
            return new
        old = self.find(st, i, local) or self.find(st, i, new)
        return old and new._replace(src=old.src)

    def upload(self, st, i, go):
        cfg = self.cfg
        launch, node, nodes = cfg.procs[i][:3]
        pc, gen, step, rnd, inc, x = st.procs[i]
        new = self.sealed(st, i)
        if new is None:
            if step < cfg.steps:
                go("local set is lost, skips step %d" % step, "U", gen, step + 1, rnd, inc,
                   x)
            else:
                go("local set is lost, nothing left to do", "X", gen, step, rnd, inc, None)
            return
        budget = st.budget
        if budget.torn and budget.restart and not self.find(st, i, new):
            less = budget._replace(torn=budget.torn - 1, restart=budget.restart - 1)
            self.give_up(st, i, go, "dies while it seals step %d" % step, budget=less,
                         kept=self.keep(st, i, new._replace(whole=False)))
        have = self.find(st, i, new)
        flush = [(new, st.kept if have else self.keep(st, i, new))]
        if cfg.mutation == "stale_flush":
            flush += [(s, st.kept) for s in st.kept[self.home[i]]
                      if s.step >= step and s.gen < gen and s.whole]
        base = self.base_for(st, st.procs[i])
        old = self.objs.all[self.recs.all[st.log[base - 1]].args[1]].refs if base else None
        ranks = [r for r in range(cfg.world) if r * nodes // cfg.world == node]
        for s, kept in flush:
            objs, keys, used = st.objs, [], 0
            for r in ranks:
                value = self.data_key(gen, s.step, r, (i, inc))._replace(src=s.src)
                if cfg.mutation == "old_keys" and s.src[:2] != (gen, s.step):
                    mask = sum(1 << n for n in range(len(self.objs.all)) if objs >> n & 1
                               and type(self.objs.all[n]) is type(value)
                               and self.objs.all[n].src == s.src
                               and self.objs.all[n].rank == r)
                    if mask:
                        keys.append((r, mask.bit_length() - 1))
                        continue
                if old is not None and r in cfg.static and old[r] is not None:
                    keys.append((r, old[r]))
                    used = base
                else:
                    objs = self.put(objs, value)
                    keys.append((r, self.objs.of[value]))
            vote = Vote(gen, s.step, node, used, tuple(keys))
            go("uploads step %d, base %d" % (s.step, used), "V", gen, s.step, rnd, inc,
               (x, self.obj(vote).bit_length() - 1), objs=objs, kept=kept)

    # ----------------------------------------------------------- transitions

    def run_proc(self, st, i, out):
        super().run_proc(st, i, out)
        cfg = self.cfg
        launch, node = cfg.procs[i][:2]
        p = st.procs[i]
        if not node and p.gen and p.pc in "UVITPG" and not self.claiming(p):
            for j, other in enumerate(cfg.procs):
                q = st.procs[j]
                if other[0] == launch and q.pc == "Z" and q.gen == p.gen:
                    go = self.goer(st, st, i, out, "%s%d: " % (launch, node))
                    self.give_up(st, i, go, "a member is gone")
                    break

    def run_rest(self, st, out):
        super().run_rest(st, out)
        v = self.view(st.log)
        if st.budget.lose:
            less = st.budget._replace(lose=st.budget.lose - 1)
            for m, sets in enumerate(st.kept):
                for s in sets:
                    kept = list(st.kept)
                    kept[m] = tuple(t for t in sets if t != s)
                    self.emit(out, st, "machine %d loses set %d.%d" % (m, s.gen, s.step),
                              st._replace(kept=tuple(kept), budget=less))
        if st.budget.unpoison:
            less = st.budget._replace(unpoison=st.budget.unpoison - 1)
            for c in v.bad:
                rid = self.record(st.log, len(st.log), "UNPOISON", "op", v.gen, (c,))
                self.emit(out, st, "operator: UNPOISON %d" % c,
                          st._replace(log=st.log + (rid,), budget=less))

    # ---------------------------------------------------------------- checks

    def epoch_at(self, log, gen):
        """The EPOCH record of a generation."""
        for rid in log:
            rec = self.recs.all[rid]
            if rec.kind == "EPOCH" and rec.gen == gen:
                return rid
        return 0

    def ancestor(self, log, gen, step):
        """The newest commit from which the set (gen, step) descends."""
        found = 0
        for n, rid in enumerate(log, 1):
            rec = self.recs.all[rid]
            if rec.kind == "COMMIT" and rec.gen == gen and rec.args[0] <= step:
                found = n
        if found:
            return found
        epoch = self.recs.all[self.epoch_at(log, gen)]
        local = epoch.args[3]
        return self.ancestor(log, *local[:2]) if local else epoch.args[1]

    def bad_ever(self, log):
        """Commits with a mark that nobody took back, also those retired since."""
        bad = set()
        for rid in log:
            rec = self.recs.all[rid]
            if rec.kind == "POISON":
                bad |= set(rec.args)
            elif rec.kind == "UNPOISON":
                bad -= set(rec.args)
            elif rec.kind == "EPOCH":
                bad |= set(rec.args[2])
        return bad

    def contents(self, man):
        """Origins of the shards that a commit wrote itself."""
        m = self.objs.all[man]
        keys = (self.objs.all[r] for r in m.refs if r is not None)
        return {k.src for k in keys if (k.gen, k.step) == (m.gen, m.step)}

    def check_append(self, old, rid, objs):
        rec = self.recs.all[rid]
        if rec.kind == "UNPOISON":
            return None
        error = super().check_append(old, rid, objs)
        if error:
            return error
        if rec.kind == "EPOCH" and rec.args[3]:
            return self.check_local(old, rec)
        if rec.kind == "COMMIT":
            v = self.view(old)
            local = self.recs.all[old[v.epoch - 1]].args[3]
            made = self.contents(rec.args[1])
            if len(made) > 1:
                return "I7: shards of two process groups in one COMMIT"
            if local and rec.args[0] == local[1]:
                if made - {local[3]}:
                    return "I7: the first step is not the set that was restored"
            elif any(s[:2] != (rec.gen, rec.args[0]) for s in made):
                return "I7: commits a set that this generation neither made nor restored"
        return None

    def check_local(self, old, rec):
        """I14, I18, I22 of an EPOCH that names a local set."""
        resume = rec.args[1]
        gen, step, epoch, src = rec.args[3]
        if self.epoch_at(old, gen) != epoch:
            return "I22: a local set of a generation that this log does not know"
        bad = self.bad_ever(old)
        nearest = self.ancestor(old, gen, step)
        if nearest in bad:
            return "I18: local set %d.%d stems from commit %d, which is bad" % (
                gen, step, nearest)
        for c in bad:
            if src in self.contents(self.recs.all[old[c - 1]].args[1]):
                return "I18: local set %d.%d has the content of commit %d, which is bad" % (
                    gen, step, c)
        if (gen, step) <= self.place(old, resume) or step <= rec.args[4]:
            return "I14: local set %d.%d is not newer than the commit %s" % (
                gen, step, self.place(old, resume))
        if nearest != resume:
            return "I14: local set %d.%d stems from commit %d, not from %d" % (
                gen, step, nearest, resume)
        return None
