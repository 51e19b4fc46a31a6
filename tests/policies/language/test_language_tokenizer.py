"""Text to tokens and back: of characters, of a model's own tokenizer, through chat templates, turn after turn."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_language import PLAIN, TALKS, build, publish

from embodied.core.errors import CheckpointError, ConfigError
from embodied.policies.language.tokenizer import CHARACTERS, END, ConversationTokenizer, of_characters

OWN = of_characters()
END_ID = min(OWN.stops)
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}" + PLAIN


def with_template(template, spec=None, chat=None):
    own = of_characters().base
    own.chat_template = template
    return ConversationTokenizer(own, [END_ID], chat)


def said(*texts, role="user"):
    return tuple({"role": role, "content": text} for text in texts)


@given(st.text(alphabet=CHARACTERS))
def test_an_encoded_text_is_decoded_to_the_same_text(text):
    ids = OWN.encode(text, first=False)
    assert len(ids) == len(text) and OWN.decode(ids) == text


def test_empty_texts_and_unknown_characters_have_tokens():
    assert OWN.encode("", first=False) == []
    assert OWN.encode("", first=True) == [END_ID]
    assert OWN.decode(OWN.encode("é=✓", first=True)) == "<unk>=<unk>"
    assert OWN.decode([*OWN.encode("95", first=False), END_ID]) == f"95{END}"


def test_without_a_template_messages_are_their_contents():
    assert OWN.encode(said("be brief", "1+1="), first=True) == OWN.encode("be brief\n1+1=", first=True)
    assert with_template(PLAIN, chat=False).encode(said("1+1="), first=True) == OWN.encode("1+1=", first=True)
    with pytest.raises(ConfigError, match=r"policy\.chat=true, but this model has no chat template"):
        of_characters(chat=True)


def test_a_later_turn_appends_what_the_template_writes_behind_an_answer():
    tokenizer = with_template(PLAIN)
    first = tokenizer.encode(said("1+1="), first=True)
    answer = [*tokenizer.encode("2", first=False), END_ID]
    stream = first + answer + tokenizer.encode(said("and +1?"), first=False)
    whole = tokenizer.render([*said("1+1="), *said("2", role="assistant"), *said("and +1?")])
    assert tokenizer.decode(stream) == whole
    assert tokenizer.decode(first) == "[user]1+1=<end>\n[assistant]"
    assert tokenizer.decode(tokenizer.encode("\n24 + 13 =", first=False)) == "\n24 + 13 ="


def test_a_template_without_the_models_answers_is_refused():
    with pytest.raises(ConfigError, match=r"leaves out the model's answers; set policy\.chat=false"):
        with_template("{{ messages[0]['content'] }}").prepare_turns("template")


def test_a_template_that_cannot_take_a_conversation_says_so():
    with pytest.raises(ConfigError, match=r"refuses this conversation \(no\)"):
        with_template(STRICT).encode(said("hm", role="tool"), first=True)


# Tokenizers of folders


def begins_with_a_token(folder):
    """As Llama's tokenizer: `<pad>` before each text."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    pieces = [{"SpecialToken": {"id": "<pad>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<pad>": {"id": "<pad>", "ids": [0], "tokens": ["<pad>"]}}
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special,
    }  # fmt: skip
    path.write_text(json.dumps(content))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<pad>"}))


THINKS = PLAIN + "{% if add_generation_prompt and not enable_thinking|default(true) %}<think></think>{% endif %}"


def test_a_system_message_begins_conversations_without_one_and_arguments_reach_the_template():
    tokenizer = with_template(THINKS)
    tokenizer.use("Be brief.", {"enable_thinking": False})
    first = tokenizer.decode(tokenizer.encode(said("1+1?"), first=True))
    assert first == "[system]Be brief.<end>\n[user]1+1?<end>\n[assistant]<think></think>"
    later = tokenizer.decode(tokenizer.encode(said("2+2?"), first=False))
    assert later == "\n[user]2+2?<end>\n[assistant]<think></think>"
    own = (*said("Own.", role="system"), *said("1+1?"))
    assert "Be brief." not in tokenizer.decode(tokenizer.encode(own, first=True))
    assert tokenizer.decode(tokenizer.encode("1+1=", first=True)) == "1+1="
    with pytest.raises(ConfigError, match="has no enable_thinkin; did you mean 'enable_thinking'"):
        tokenizer.use(None, {"enable_thinkin": False})
    with pytest.raises(ConfigError, match=r"policy\.system: this model has no chat template"):
        of_characters().use("Be brief.", {})


def test_a_text_begins_with_the_models_own_beginning_once(tmp_path):
    folder = publish(tmp_path, "llama", False, template=PLAIN)
    begins_with_a_token(folder)
    tokenizer = build(pretrained=str(folder)).tokenizer
    assert tokenizer.encode("1+1=", first=True) == [0, *OWN.encode("1+1=", first=True)]
    assert tokenizer.encode("1+1=", first=False) == OWN.encode("1+1=", first=False)
    assert tokenizer.encode("", first=True) == [0]
    assert 0 not in tokenizer.encode(said("1+1="), first=True)  # the template says how a conversation begins


def test_all_ends_that_a_folder_names_end_an_answer(tmp_path):
    folder = publish(tmp_path, "llama", False)
    assert build(pretrained=str(folder)).tokenizer.stops == {1, 3}
    (folder / "generation_config.json").unlink()
    assert build(pretrained=str(folder)).tokenizer.stops == {1}


def test_a_folder_without_a_tokenizer_or_with_another_models_is_refused(tmp_path):
    folder = publish(tmp_path, "llama", False)
    own = build(pretrained=str(folder)).tokenizer.base
    own.add_tokens(["<more>"])
    own.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="101 tokens, its model 100"):
        build(pretrained=str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer that can be read"):
        build(pretrained=str(folder))


def test_the_template_travels_with_a_saved_policy(tmp_path):
    folder = publish(tmp_path / "theirs", "qwen3", True, template=PLAIN)
    policy = build(TALKS, pretrained=str(folder))
    policy.save_pretrained(tmp_path / "ours")
    again = build(TALKS, pretrained=str(tmp_path / "ours"))
    assert again.tokenizer.encode(said("a"), first=True) == policy.tokenizer.encode(said("a"), first=True)
    assert again.tokenizer.chat
