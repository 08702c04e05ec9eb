"""Clients of reward services and retrievers.

Reading order: services, reward_client, retriever_client, http/.
"""
