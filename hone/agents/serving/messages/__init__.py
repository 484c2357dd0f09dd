"""``/v1/messages``: Anthropic's Messages API, translated to a chat and recorded like one.

==============  ===========================================================================================
``request``     body of a request, and its translation to a chat
``call``        content blocks as messages, a reply as content blocks; the call: a complete message, or its events
==============  ===========================================================================================
"""

from hone.agents.serving.messages.call import MessagesCall, count_tokens
from hone.agents.serving.messages.request import CountBody, MessagesBody

__all__ = ["CountBody", "MessagesBody", "MessagesCall", "count_tokens"]
