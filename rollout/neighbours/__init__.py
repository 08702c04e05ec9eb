"""Clients of reward services and retrievers.

Reading order: services, reward_client, reward_endpoint, retriever_client, http/.
"""
