"""LangChain on `minipaged serve`: pip install langchain-openai, then python langchain_client.py."""

from langchain_openai import ChatOpenAI

llm = ChatOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", model="minipaged-demo", max_tokens=40)
print(llm.invoke("Who goes there?").content)
