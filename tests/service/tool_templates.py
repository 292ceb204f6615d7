"""Chat templates with tools in the manner of the known families, written for these tests."""

from __future__ import annotations

# Hermes, Qwen 2.5 and Qwen 3: tags around JSON; results in a turn of the person; reasoning of
# earlier turns cut off.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nSignatures are between <tools> and </tools>:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nWrite each call as\\n<tool_call>\\n{"name": <name>, "arguments": ' }}
    {{- '<object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last or reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {%- set tool_call = tool_call.function if tool_call.function else tool_call %}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# Llama 3: tools as indented JSON in the first turn of the person; one call a turn.
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{%- if builtin_tools is defined %}
    {{- 'Tools: ' + builtin_tools | reject('equalto', 'code_interpreter') | join(', ') + '\\n\\n' }}
{%- endif %}
{{- 'Today Date: ' + date_string + '\\n\\n' }}{{- system_message }}{{- '<|eot_id|>' }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}{{- raise_exception('There is no first message') }}{%- endif %}
    {%- set first_user_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {{- 'Answer with JSON {"name": function name, "parameters": dictionary of arguments}.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- first_user_message + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('One call a turn, no more') }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- '}' }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# Mistral: strict turns, ids of nine letters, and JSON put together from dicts and constants.
MISTRAL = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- '[AVAILABLE_TOOLS][' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != 'return' %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}
                {{- '}}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' }}{%- endif %}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST]' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST]' + message['content'] + '[/INST]' }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS][' }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception('Ids of calls have nine letters and digits') }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | string }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only the known roles') }}{%- endif %}
{%- endfor %}"""

# Mistral from its eleventh tokenizer on: the name before the arguments.
MISTRAL_NAMES = """{{- bos_token }}
{%- if tools is defined and tools %}
    {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'system' %}{{- '[SYSTEM_PROMPT]' + message['content'] }}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] %}{{- message['content'] }}{%- endif %}
        {%- for call in message['tool_calls'] or [] %}
            {{- '[TOOL_CALLS]' + call['function']['name'] + '[ARGS]' }}
            {%- set arguments = call['function']['arguments'] %}
            {%- if arguments is not string %}{%- set arguments = arguments | tojson %}{%- endif %}
            {{- arguments }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]' + message['tool_call_id'] + '[TOOL_CONTENT]' + message['content'] }}
        {{- '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

# SmolLM3: tools under another name, written as Python writes them.
SMOLLM3 = """{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}
{{- '<|im_start|>system\\nReasoning Mode: ' }}
{{- '/think' if enable_thinking else '/no_think' }}
{%- if messages[0].role == 'system' %}{{- '\\n' + messages[0].content.rstrip() }}{%- endif %}
{%- if xml_tools %}
    {%- set ns = namespace(text='\\n<tools>\\n') %}
    {%- for tool in xml_tools[:] %}
        {%- set ns.text = ns.text ~ (tool | string) ~ '\\n' %}
    {%- endfor %}
    {{- ns.text + '</tools>\\n' }}
    {{- '<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {% generation %}{{- '<|im_start|>assistant\\n' }}
        {%- if not enable_thinking %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}
        {{- content.lstrip('\\n') }}{{- '<|im_end|>\\n' }}{% endgeneration %}
    {%- elif message.role == 'tool' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
{%- if not enable_thinking %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}"""

# Like several others: schemas written as types, by looking into them; arguments one by one.
TYPES = """{%- macro type_of(schema) %}
    {%- if schema.type == 'string' %}
        {%- if schema.enum %}{{- '"' + schema.enum | join('" | "') + '"' }}
        {%- else %}{{- 'string' }}{%- endif %}
    {%- elif schema.type == 'array' %}{{- type_of(schema['items']) + '[]' }}
    {%- elif schema.type == 'object' %}
        {{- '{ ' }}
        {%- for name, inner in schema.properties.items() %}
            {{- name + ('' if name in (schema.required or []) else '?') + ': ' + type_of(inner) }}
            {%- if inner.description %}{{- ' // ' + inner.description }}{%- endif %}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ' }' }}
    {%- else %}{{- schema.type or 'any' }}{%- endif %}
{%- endmacro %}
{%- for tool in tools or [] %}
    {{- '<|im_start|>tool ' + tool.function.name + ' // ' + tool.function.description + '\\n' }}
    {{- type_of(tool.function.parameters) + '<|im_end|>\\n' }}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<' + call.function.name + '>' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '\\n' + name + '=' + (value | tojson if value is not string else value) }}
        {%- endfor %}
        {{- '\\n</' ~ call.function.name ~ '>' ~ call.function.arguments }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' + (effort | default('low')) }}"""

# Some distilled models: arguments must be text, or adding them to text fails.
TEXT_ARGUMENTS = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- call.type + ' ' + call['function']['name'] + '\\n```json\\n' }}
        {{- call['function']['arguments'] + '\\n```' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}{{- tools | length if tools else '' }}<|im_start|>assistant\\n"""

TEMPLATES = {
    "qwen": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral_names": MISTRAL_NAMES,
    "smollm3": SMOLLM3,
    "types": TYPES,
    "text_arguments": TEXT_ARGUMENTS,
}

CONTROL_TOKENS = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|python_tag|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]", "[TOOL_CONTENT]"),
    *("[SYSTEM_PROMPT]", "<tool_call>", "</tool_call>", "<think>", "</think>"),
]
