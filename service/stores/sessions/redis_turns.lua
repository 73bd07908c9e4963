-- Put after redis_common.lua before the scripts that know turn records. KEYS[6]: turns (hash: "index": a JSON list of
-- the records, oldest first; "q:<id>": request; "r:<id>": result), KEYS[7]: tail (list: the running turn's chunks).
-- A record: id, identity ('' for none), digest, base, status, cancel ('0' or '1'), expires (microseconds as text: JSON
-- numbers lose digits), bytes (of the result; while it runs, of the request and the chunks).
local turns_key, tail_key = KEYS[6], KEYS[7]
local ABANDONED_US = 3600 * 1000000
local RUNNING_US = 2 * 86400 * 1000000 -- longer than any turn may take

local function read_turns(now)
  local raw, turns = redis.call('HGET', turns_key, 'index'), {}
  for _, turn in ipairs(raw and cjson.decode(raw) or {}) do
    if tonumber(turn.expires) > now then turns[#turns + 1] = turn end
  end
  return turns
end

local function drop_turn(turns, position)
  redis.call('HDEL', turns_key, 'q:' .. turns[position].id, 'r:' .. turns[position].id)
  table.remove(turns, position)
end

local function write_index(head, turns)
  local bytes, until_us = 0, 0
  for _, turn in ipairs(turns) do
    bytes = bytes + turn.bytes
    until_us = math.max(until_us, tonumber(turn.expires))
  end
  if #turns > 0 then redis.call('HSET', turns_key, 'index', cjson.encode(turns)) end
  write_head(head, {turn_bytes = whole(bytes), turns_us = whole(until_us)})
end

-- Also what read_turns left out is gone after this.
local function write_turns(head, turns)
  local fields = {index = true}
  for _, turn in ipairs(turns) do fields['q:' .. turn.id], fields['r:' .. turn.id] = true, true end
  if #turns == 0 then
    redis.call('UNLINK', turns_key, tail_key)
  else
    for _, field in ipairs(redis.call('HKEYS', turns_key)) do
      if not fields[field] then redis.call('HDEL', turns_key, field) end
    end
  end
  write_index(head, turns)
end

local function find_running(turns)
  for position, turn in ipairs(turns) do
    if turn.status == 'running' then return turn, position end
  end
end

-- `digest`: also one that ended in another way counts, if its digest is another.
local function find_repeatable(turns, identity, digest)
  for position = #turns, 1, -1 do
    local turn = turns[position]
    local is_repeatable = turn.status == 'running' or turn.status == 'committed' or digest and turn.digest ~= digest
    if identity ~= '' and turn.identity == identity and is_repeatable then
      return turn
    end
  end
end

-- `result` is nil for a turn that nobody came back for.
local function close_turn(turn, status, result, expires_us)
  redis.call('HDEL', turns_key, 'q:' .. turn.id)
  redis.call('UNLINK', tail_key)
  if result then redis.call('HSET', turns_key, 'r:' .. turn.id, result) end
  turn.status, turn.expires, turn.bytes = status, whole(expires_us), result and #result or 0
end

-- The session moves on: by turn `id`, or by something else.
local function end_running(head, id, result, ttl_us)
  local now = clock_us()
  local turns = read_turns(now)
  local turn = find_running(turns)
  if not turn then return end
  if turn.id == id then
    close_turn(turn, 'committed', result, now + tonumber(ttl_us))
  else
    close_turn(turn, 'failed', nil, now + ABANDONED_US)
  end
  write_turns(head, turns)
end

-- The session was taken back to `from_version`: what turns made of it since then is deleted.
local function drop_results(head, from_version)
  local turns = read_turns(clock_us())
  for _, turn in ipairs(turns) do
    if tonumber(turn.base) >= from_version and turn.bytes > 0 then
      redis.call('HDEL', turns_key, 'r:' .. turn.id)
      turn.status, turn.bytes = 'cancelled', 0
    end
  end
  if #turns > 0 then write_turns(head, turns) end
end

local function lease_left_us(head, now)
  if head.holder == '' then return 0 end
  return math.max(0, tonumber(head.lease_us) - now)
end

-- JSON, request, result, the rest of the lease, chunks.
local function show_turn(head, turn, now, first_chunk, is_brief)
  local shown = {
    'turn', cjson.encode(turn), not is_brief and redis.call('HGET', turns_key, 'q:' .. turn.id) or '',
    redis.call('HGET', turns_key, 'r:' .. turn.id) or '', whole(lease_left_us(head, now)),
  }
  if turn.status == 'running' then
    for _, chunk in ipairs(redis.call('LRANGE', tail_key, first_chunk, -1)) do shown[#shown + 1] = chunk end
  end
  return shown
end
