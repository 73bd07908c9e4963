#!lua flags=allow-oom
drop_expired()
return {redis.call('ZCARD', index_key), tonumber(redis.call('HGET', usage_key, 'bytes')) or 0}
