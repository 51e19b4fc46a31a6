"""Stands in for a process that plays an environment of `verifiers`: the same lines in and out, and real requests to the
endpoint, without the package. What it plays is said in `env.kwargs`: {plays: two turns}.
"""

import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request


def stand_in(script):
    """Make an interpreter there whose only program is this one."""
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {__file__}\n")
    script.chmod(0o755)


class Chat:
    def __init__(self, start, number):
        self.start, self.number, self.messages, self.more, self.run = start, number, [], {}, "0"

    def ask(self, *messages):
        """Append these and the answer."""
        self.messages += messages
        model = f"policy-{self.number}"
        body = json.dumps({"model": model, "messages": self.messages, "max_tokens": 7, **self.more}).encode()
        headers = {"Authorization": "Bearer " + self.start["key"], "X-Session-ID": self.run}
        where = f"{self.start['url']}/v1/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(where, body, headers)) as reply:
            message = json.load(reply)["choices"][0]["message"]
        self.messages.append(message)
        return message


PICTURE = "data:image/png;base64,AAAA"


def user(text):
    return {"role": "user", "content": text}


def play(plays, chat, example, right):
    """Hold a conversation; returns the answer that is scored."""
    if plays == "tools":
        chat.more["tools"] = [{"type": "function", "function": {"name": "double", "parameters": {}}}]
        message = chat.ask(user(f"{example}?"))
        while "tool_calls" in message:
            call = message["tool_calls"][0]
            doubled = json.loads(call["function"]["arguments"])["x"] * 2
            message = chat.ask({"role": "tool", "tool_call_id": call["id"], "content": str(doubled)})
        return message["content"]
    if plays == "pictures":
        url = "x" if example.endswith(" 1") else PICTURE
        return chat.ask({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})["content"]
    if plays == "streams":
        chat.more["stream"] = True
    answer = chat.ask({"role": "system", "content": "Add."}, user(f"{example}?"))["content"]
    if answer == "hang":
        time.sleep(1000)
    if answer == "die":
        os._exit(3)
    if answer == "fail":
        raise RuntimeError("no sandbox is left")
    if plays == "rewrites":
        chat.messages[1] = user("something else?")
    if plays in ("two turns", "rewrites"):
        try:
            answer = chat.ask(user(f"again, {answer}?"))["content"]
        except urllib.error.HTTPError as err:
            told_to_end = err.code == 400 and b"context length" in err.read()
            return f"{right} in part" if told_to_end else ""
    return answer


def siblings(chat, example):
    """Three runs of an agent; the longest answer wins."""
    answers = []
    for chat.run in "abc":
        chat.messages = []
        answers.append(chat.ask(user(f"{example}?"))["content"])
    best = max(map(len, answers))
    runs = [
        {"run": run, "reward": float(len(answer) == best), "metrics": {}, "answer": "", "raised": []}
        for run, answer in zip("abc", answers)
    ]
    return {"reward": sum(run["reward"] for run in runs), "metrics": {}, "answer": "", "raised": [], "runs": runs}


def main():
    start, lock = json.loads(sys.stdin.readline()), threading.Lock()
    plays = start["kwargs"].get("plays", "one turn")

    def say(**line):
        with lock:
            print(json.dumps(line), flush=True)

    def roll(number, held_out, index):
        try:
            example = f"{'held out' if held_out else 'train'} {index}"
            chat = Chat(start, number)
            if plays == "siblings":
                return say(ended=number, **siblings(chat, example))
            answer = play(plays, chat, example, index)
        except Exception as err:
            return say(ended=number, error=f"{type(err).__name__}: {err}")
        reward = {str(index): 1.0, f"{index} in part": 0.5}.get(answer, 0.0)
        say(ended=number, reward=reward, metrics={"right": reward}, answer=str(index), raised=[])

    say(train=950, held_out=20, turns=1 if plays == "one turn" else 2, kind="StandInEnv", compares=False, version="0")
    if start["url"]:
        for line in sys.stdin:
            asked = json.loads(line)
            if "begin" in asked:
                rest = asked["begin"], asked["held_out"], asked["number"]
                threading.Thread(target=roll, args=rest, daemon=True).start()


if __name__ == "__main__":
    main()
