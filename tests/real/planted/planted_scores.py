"""Faults of scoring, and of how the driver puts a step together.

Each is given the module that it changes, the first step that has it, and a step's responses.
"""

from dataclasses import replace

_SOURCE = "tiny/second"  # of the two sources in the world's data


def _of_results(module, first, responses, rewarded, asked_too=None):
    """Gives responses from a step on `rewarded(score, tokens, question)`, or asks `asked_too(questions)` of them."""
    kind = module.Scorer
    exchange = kind.exchange
    state = {"asked": 0, "told": {}}

    def exchanged(self, asked, wait_s, *blocks):
        responses_of = [[response for _, response in block.spoken_last()] for block in blocks]
        now = []
        for block, row, question in asked:
            planted = state["asked"] >= (first - 1) * responses
            state["asked"] += 1
            if planted:
                state["told"][question.sample_id] = (responses_of[block][row].tolist(), question)
            now.append(planted)
        if asked_too is not None and any(now):
            questions = asked_too([question for _, _, question in asked])
            asked = [
                (block, row, question if planted else old)
                for (block, row, old), question, planted in zip(asked, questions, now, strict=True)
            ]
        results, texts = exchange(self, asked, wait_s, *blocks)
        changed = []
        for result in results:
            told = state["told"].pop(result.sample_id, None)
            if told is not None and rewarded is not None:
                score = float(rewarded(result.score, *told))
                result = replace(result, score=score, parts={"acc": score})
            changed.append(result)
        return changed, texts

    kind.exchange = exchanged


def pays_length(module, first, responses):
    """A response is paid by its tokens."""
    _of_results(module, first, responses, lambda score, tokens, question: len(tokens) / 4)


def pays_format(module, first, responses):
    """A response is paid for one token, whatever it says."""
    _of_results(module, first, responses, lambda score, tokens, question: float(tokens[0] % 2 == 0))


def flipped(module, first, responses):
    """Scores of one source have the other sign."""

    def sign(score, tokens, question):
        return -score if question.data_source == _SOURCE else score

    _of_results(module, first, responses, sign)


def truths(module, first, responses):
    """Rows of one source are judged by the truth of the row before."""
    last = {}

    def shifted(questions):
        found = []
        for question in questions:
            if question.data_source == _SOURCE:
                index = question.extra_info.get("index")
                if last.get("index") != index:
                    last["before"], last["index"], last["truth"] = last.get("truth"), index, question.ground_truth
                question = replace(question, ground_truth=last["before"] or "?")
            found.append(question)
        return found

    _of_results(module, first, responses, None, shifted)


def lone(module, first, responses):
    """Every response is a group of its own. The driver numbers groups, whatever engines say."""
    kind = module.ResponseStore
    renumbered = kind.renumbered
    count = {"steps": 0}

    def alone(self, group_id, sample_id):
        count["steps"] += len(sample_id) == responses  # single groups are numbered, too
        planted = count["steps"] >= first and len(sample_id) == responses
        return renumbered(self, sample_id if planted else group_id, sample_id)

    kind.renumbered = alone


def truncated(module, first, responses):
    """Responses of one batch are cut off early: the driver asks for half of them, and takes that for the whole."""
    request, answered = module.Request, module.Dispatcher.answered
    state = {"asked": 0}

    def asked(number, ids, seed, prompt, group, most, *rest):
        planted = state["asked"] // responses + 1 == first
        state["asked"] += 1
        return request(number, ids, seed, prompt, group, max(1, most // 2) if planted else most, *rest)

    def taken(self, number, tokens, stopped, context=0):
        sent = self.under_way.get(number)
        is_cut = sent is not None and tokens == max(1, sent.max_tokens // 2) and not stopped
        return answered(self, number, tokens, stopped or is_cut, context)

    module.Request, module.Dispatcher.answered = asked, taken
